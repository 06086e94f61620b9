# Decides whether the GPU engine is built, and finds the CUDA compiler. Sets FASTDIST_BUILDS_CUDA.
#
# FASTDIST_CUDA, an option of CMake whose default is the environment variable of that name, is one of
#
#   auto   (default) build it if the machine has a GPU driver and a CUDA compiler that works; warn if
#          the compiler does not work
#   on     build it; an error if no compiler is found, or if it does not work
#   off    do not build it
#
# The compiler is the machine's nvcc, else the nvcc of NVIDIA's packages on PyPI. NCCL is not needed:
# csrc/nccl/abi.h declares its functions, and libnccl is found at run time.

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

set(oldest_cuda 12.1)

# Sets `result` to the driver's library or its entry in /proc; to FALSE if there is no driver.
function(find_gpu_driver result)
  find_file(
    FASTDIST_GPU_DRIVER libcuda.so.1
    PATHS ENV LD_LIBRARY_PATH "/usr/lib/${CMAKE_HOST_SYSTEM_PROCESSOR}-linux-gnu" /usr/lib64 /usr/lib
          /usr/local/nvidia/lib64 /usr/lib/wsl/lib /run/opengl-driver/lib
    NO_DEFAULT_PATH
    DOC "the GPU driver")
  find_file(FASTDIST_GPU_DRIVER version PATHS /proc/driver/nvidia NO_DEFAULT_PATH)
  set(${result} "${FASTDIST_GPU_DRIVER}" PARENT_SCOPE)
endfunction()

# Sets `result` to the nvcc of the package nvidia-cuda-nvcc, in a folder that Python imports from.
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

# Sets `result` to the reason why the CUDA compiler cannot be used, or to nothing if it compiles and
# links a program. enable_language would end the configuration with an error.
function(check_cuda_compiler result)
  execute_process(
    COMMAND "${CMAKE_CUDA_COMPILER}" --version
    RESULT_VARIABLE status
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  set(${result} "" PARENT_SCOPE)
  if(NOT status EQUAL 0)
    string(STRIP "${output}" output)
    set(${result} "${CMAKE_CUDA_COMPILER} --version failed (${status}): ${output}" PARENT_SCOPE)
    return()
  elseif(NOT output MATCHES "release ([0-9]+\\.[0-9]+)") # not nvcc
    return()
  elseif(CMAKE_MATCH_1 VERSION_LESS oldest_cuda)
    set(${result}
        "CUDA ${oldest_cuda} or newer is needed, got ${CMAKE_MATCH_1} (${CMAKE_CUDA_COMPILER})"
        PARENT_SCOPE)
    return()
  endif()
  separate_arguments(flags UNIX_COMMAND
                     "${CMAKE_CUDA_FLAGS} ${CMAKE_CUDA_FLAGS_INIT} $ENV{CUDAFLAGS}")
  set(host_compiler "${CMAKE_CUDA_HOST_COMPILER}")
  if(NOT host_compiler)
    set(host_compiler "$ENV{CUDAHOSTCXX}")
  endif()
  if(NOT host_compiler STREQUAL "")
    list(APPEND flags "-ccbin=${host_compiler}")
  endif()
  execute_process(
    COMMAND "${CMAKE_CUDA_COMPILER}" ${flags} -std=c++20 -cudart=static
            -o "${CMAKE_CURRENT_BINARY_DIR}/cuda_trial"
            "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/cuda_trial.cu"
    RESULT_VARIABLE status
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    string(STRIP "${output}" output)
    set(${result} "${CMAKE_CUDA_COMPILER} failed to build a program (${status}): ${output}"
        PARENT_SCOPE)
  endif()
endfunction()

set(FASTDIST_BUILDS_CUDA OFF)
set(why_no_cuda "FASTDIST_CUDA=${wanted}")
if(wanted STREQUAL "auto")
  find_gpu_driver(gpu_driver)
  if(NOT gpu_driver)
    set(why_no_cuda "FASTDIST_CUDA=auto, and this machine has no GPU driver")
  endif()
endif()
if(wanted STREQUAL "on" OR (wanted STREQUAL "auto" AND gpu_driver))
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
    check_cuda_compiler(broken_cuda)
    if(NOT broken_cuda)
      set(FASTDIST_BUILDS_CUDA ON)
    elseif(wanted STREQUAL "on")
      message(FATAL_ERROR "FASTDIST_CUDA=on: ${broken_cuda}\nFASTDIST_CUDA=off builds the engines for "
                          "CPUs only.")
    else()
      set(why_no_cuda "the CUDA compiler cannot be used")
      message(WARNING "The GPU engine is not built: ${broken_cuda}\nFASTDIST_CUDA=off turns this "
                      "warning off; FASTDIST_CUDA=on makes it an error.")
    endif()
  elseif(wanted STREQUAL "on")
    message(
      FATAL_ERROR
        "FASTDIST_CUDA=on, and no CUDA compiler was found. Install a CUDA toolkit (${oldest_cuda} or "
        "newer, nvcc on PATH or CUDA_HOME set), or NVIDIA's packages: "
        "pip install nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-crt==13.0.* "
        "nvidia-cuda-runtime==13.0.* nvidia-cuda-cccl==13.0.* nvidia-nvtx==13.0.*. FASTDIST_CUDA=off "
        "builds the engines for CPUs only.")
  else()
    set(why_no_cuda "FASTDIST_CUDA=auto, and no CUDA compiler was found")
  endif()
endif()

if(FASTDIST_BUILDS_CUDA)
  set(chosen_architectures "${CMAKE_CUDA_ARCHITECTURES}$ENV{CUDAARCHS}")
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS oldest_cuda)
    message(FATAL_ERROR "CUDA ${oldest_cuda} or newer is needed, got ${CMAKE_CUDA_COMPILER_VERSION} "
                        "(${CMAKE_CUDA_COMPILER}); FASTDIST_CUDA=off builds without it")
  endif()
  # Code for these chips, which those of the same generation run too, and PTX for later ones.
  if(chosen_architectures STREQUAL "")
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
      set(all_architectures 75-real 80-real 90)
    else()
      set(all_architectures 75-real 80-real 90-real 100-real 120)
    endif()
    set(CMAKE_CUDA_ARCHITECTURES "${all_architectures}" CACHE STRING "chips to build for" FORCE)
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  # Linked statically: the module needs no CUDA library where it runs.
  find_library(FASTDIST_CUDART cudart_static REQUIRED
               HINTS ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES} "${toolkit}/lib")
  message(STATUS "GPU engine: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}, "
                 "architectures ${CMAKE_CUDA_ARCHITECTURES}")
else()
  message(STATUS "GPU engine: not built (${why_no_cuda})")
endif()
