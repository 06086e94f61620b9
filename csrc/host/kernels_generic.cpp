#define FASTDIST_ISA generic
#define FASTDIST_VECTOR_BYTES 16
#include "host/kernels_loops.h"
