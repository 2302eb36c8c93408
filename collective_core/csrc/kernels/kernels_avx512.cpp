// The kernels compiled for processors with AVX512; see CMakeLists.txt for the flags.
#define CC_KERNELS kernels_avx512
#define CC_KERNELS_NAME "avx512"
#include "kernels/kernels_body.inc"
