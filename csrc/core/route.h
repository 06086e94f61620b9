// The way that an engine would take for a call, and what the call's time depends on.
#pragma once

#include <string>

namespace fastdist {

struct Route {
  std::string way;           // a name
  std::string why;           // the condition that chose it
  bool moves_arrays = true;  // false if the bytes travel with the headers, or nowhere
  int crossings = 0;         // between machines, one after the other
  double link_bytes = 0;     // bytes that the busiest link carries in one direction
};

}  // namespace fastdist
