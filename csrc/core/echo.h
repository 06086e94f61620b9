// A thread that shows a peer that this process runs, however long its other threads are busy.
#pragma once

#include "core/file_descriptor.h"

namespace fastdist {

// Sends back what comes over a connected socket, in a thread that ends with the connection.
//
// Throws Error (kSystem) if no thread can be made.
void echo(FileDescriptor connected);

}  // namespace fastdist
