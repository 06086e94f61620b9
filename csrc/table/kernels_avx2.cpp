#define FASTDIST_ISA avx2
#include "table/kernels_loops.h"
