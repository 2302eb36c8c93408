// The kernels compiled for processors with AVX2; see CMakeLists.txt for the flags.
#define CC_KERNELS kernels_avx2
#define CC_KERNELS_NAME "avx2"
#include "kernels/kernels_body.inc"
