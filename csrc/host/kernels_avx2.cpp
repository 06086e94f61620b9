#define FASTDIST_ISA avx2
#define FASTDIST_VECTOR_BYTES 32
#include "host/kernels_loops.h"
