# Decides whether the GPU engine is built, and finds the compiler for it. Sets FASTDIST_BUILDS_CUDA.
#
# FASTDIST_CUDA is auto (build if a compiler is found), on (fail if none is found) or off; the
# environment variable of that name is its default. The compiler is the machine's nvcc or, if there
# is none, nvcc from NVIDIA's packages on PyPI. NCCL is not needed: csrc/nccl/abi.h declares its
# functions, and libnccl is found at run time.

if("$ENV{FASTDIST_CUDA}" STREQUAL "")
  set(default_cuda "auto")
else()
  set(default_cuda "$ENV{FASTDIST_CUDA}")
endif()
set(FASTDIST_CUDA "${default_cuda}" CACHE STRING "build the GPU engine: auto, on or off")
string(TOLOWER "${FASTDIST_CUDA}" wanted)
if(NOT wanted MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "FASTDIST_CUDA must be auto, on or off, got \"${FASTDIST_CUDA}\"")
endif()

# Finds the nvcc of the package nvidia-cuda-nvcc on Python's import path.
function(find_nvcc_of_python result)
  find_package(Python COMPONENTS Interpreter QUIET)
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND
        "${Python_EXECUTABLE}" -c
        "import pathlib, sys; print(*sorted((str(c) for p in sys.path if p for c in pathlib.Path(p).glob('nvidia/cu*/bin/nvcc')), reverse=True), sep=';', end='')"
      OUTPUT_VARIABLE found)
    list(GET found 0 first)
    if(first)
      set(${result} "${first}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

set(FASTDIST_BUILDS_CUDA OFF)
if(NOT wanted STREQUAL "off")
  if(NOT CMAKE_CUDA_COMPILER)
    find_program(FASTDIST_NVCC nvcc PATHS ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda
                 PATH_SUFFIXES bin DOC "the CUDA compiler")
    if(NOT "$ENV{CUDACXX}" STREQUAL "")
      set(CMAKE_CUDA_COMPILER "$ENV{CUDACXX}")
    elseif(FASTDIST_NVCC)
      set(CMAKE_CUDA_COMPILER "${FASTDIST_NVCC}")
    else()
      find_nvcc_of_python(CMAKE_CUDA_COMPILER)
      if(CMAKE_CUDA_COMPILER)
        # nvcc's profile expects lib64, but the packages have lib.
        get_filename_component(toolkit "${CMAKE_CUDA_COMPILER}/../.." ABSOLUTE)
        set(CMAKE_CUDA_FLAGS_INIT "-L${toolkit}/lib")
      endif()
    endif()
  endif()
  if(CMAKE_CUDA_COMPILER)
    set(FASTDIST_BUILDS_CUDA ON)
  elseif(wanted STREQUAL "on")
    message(
      FATAL_ERROR
        "FASTDIST_CUDA=on, and no CUDA compiler was found. Install a CUDA toolkit (12.1 or newer, "
        "nvcc on PATH or CUDA_HOME set), or NVIDIA's packages: "
        "pip install nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-crt==13.0.* "
        "nvidia-cuda-runtime==13.0.* nvidia-cuda-cccl==13.0.*. FASTDIST_CUDA=off builds the engines "
        "for CPUs only.")
  endif()
endif()

if(FASTDIST_BUILDS_CUDA)
  set(chosen_architectures "${CMAKE_CUDA_ARCHITECTURES}$ENV{CUDAARCHS}")
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.1)
    message(FATAL_ERROR "CUDA 12.1 or newer is needed, got ${CMAKE_CUDA_COMPILER_VERSION} "
                        "(${CMAKE_CUDA_COMPILER}); FASTDIST_CUDA=off builds without it")
  endif()
  # Build code for these chips, and PTX of the first and last for chips between and after them.
  if(chosen_architectures STREQUAL "")
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
      set(all_architectures 80 90)
    else()
      set(all_architectures 80 90-real 100-real 120)
    endif()
    set(CMAKE_CUDA_ARCHITECTURES "${all_architectures}" CACHE STRING "chips to build for" FORCE)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  # Linked statically, so that the module needs no CUDA library at run time.
  find_library(FASTDIST_CUDART cudart_static REQUIRED
               HINTS ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES} "${toolkit}/lib")
  message(STATUS "GPU engine: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, "
                 "architectures ${CMAKE_CUDA_ARCHITECTURES}")
else()
  message(STATUS "GPU engine: not built (FASTDIST_CUDA=${wanted})")
endif()
