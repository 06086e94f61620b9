#define FASTDIST_ISA avx512
#define FASTDIST_VECTOR_BYTES 64
#include "host/kernels_loops.h"
