#define FASTDIST_ISA generic
#include "table/kernels_loops.h"
