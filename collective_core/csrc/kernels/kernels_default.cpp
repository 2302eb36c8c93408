// The kernels compiled for the baseline of the platform.
#define CC_KERNELS kernels_default
#define CC_KERNELS_NAME "default"
#include "kernels/kernels_body.inc"
