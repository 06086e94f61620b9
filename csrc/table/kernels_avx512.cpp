#define FASTDIST_ISA avx512
#include "table/kernels_loops.h"
