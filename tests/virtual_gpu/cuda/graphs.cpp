// Capture of streams into graphs, and launches of graphs.

#include <algorithm>
#include <random>
#include <utility>

#include "virtual_gpu/cuda/state.h"

namespace virtual_gpu {
namespace {

// Ends the capture for all streams in it.
void leave(State& s, const std::shared_ptr<Capture>& capture) {
  for (const auto& [handle, tail] : capture->tails) {
    const auto found = s.streams.find(handle);
    if (found != s.streams.end() && found->second->capture == capture) {
      found->second->capture = nullptr;
    }
  }
  s.captures.erase(capture);
}

// Returns true if all captured work is ordered before the end of the origin stream.
bool is_joined(const Capture& capture) {
  std::set<std::size_t> reached;
  std::vector<std::size_t> next;
  const auto& tail = capture.tails.at(capture.origin);
  next.assign(tail.begin(), tail.end());
  while (!next.empty()) {
    const std::size_t node = next.back();
    next.pop_back();
    if (!reached.insert(node).second) continue;
    const auto& after = capture.nodes[node].after;
    next.insert(next.end(), after.begin(), after.end());
  }
  return reached.size() == capture.nodes.size();
}

// Runs the nodes in a random order that their edges allow, so that missing edges are detected. The
// calls of communicators keep their order: otherwise ranks could wait for each other.
void run_nodes(const std::vector<Node>& nodes) {
  thread_local std::minstd_rand random{std::random_device{}()};
  std::vector<bool> has_run(nodes.size(), false);
  for (std::size_t count = 0; count < nodes.size(); ++count) {
    std::vector<std::size_t> ready;
    bool is_chain_ahead = false;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (has_run[i]) continue;
      bool is_ready = !nodes[i].chain || !is_chain_ahead;
      for (const std::size_t before : nodes[i].after) is_ready = is_ready && has_run[before];
      if (is_ready) ready.push_back(i);
      is_chain_ahead = is_chain_ahead || nodes[i].chain;
    }
    const std::size_t chosen = ready[random() % ready.size()];
    if (nodes[chosen].run) nodes[chosen].run();
    has_run[chosen] = true;
  }
}

bool holds(const std::vector<Node>& nodes, const std::shared_ptr<Chain>& chain) {
  return std::any_of(nodes.begin(), nodes.end(),
                     [&](const Node& node) { return node.chain == chain; });
}

}  // namespace

void wait_for_graphs(const std::shared_ptr<Chain>& chain) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  s.changed.wait(lock, [&] {
    return std::none_of(s.graphs.begin(), s.graphs.end(),
                        [&](cudaGraph_t graph) { return holds(graph->nodes, chain); }) &&
           std::none_of(s.execs.begin(), s.execs.end(),
                        [&](cudaGraphExec_t exec) { return holds(*exec->nodes, chain); });
  });
}

}  // namespace virtual_gpu

using namespace virtual_gpu;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.lost != cudaSuccess) return remember(s.lost);
  if (stream == nullptr) return remember(cudaErrorStreamCaptureUnsupported);
  const auto found = find_stream(s, stream, current_device());
  if (!found) return remember(cudaErrorInvalidResourceHandle);
  if (found->capture) return remember(cudaErrorInvalidValue);
  static unsigned long long captures = 0;  // under the lock
  auto capture = std::make_shared<Capture>();
  capture->id = ++captures;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = stream;
  capture->tails[stream] = {};
  found->capture = capture;
  s.captures.insert(std::move(capture));
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  *graph = nullptr;
  const auto found = find_stream(s, stream, current_device());
  if (!found) return remember(cudaErrorInvalidResourceHandle);
  const auto capture = found->capture;
  if (!capture || capture->origin != stream) return remember(cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return remember(cudaErrorStreamCaptureWrongThread);
  }
  leave(s, capture);
  if (!capture->is_valid) return remember(cudaErrorStreamCaptureInvalidated);
  if (!is_joined(*capture)) return remember(cudaErrorStreamCaptureUnjoined);
  *graph = new CUgraph_st{capture->nodes};
  s.graphs.insert(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (!s.graphs.contains(graph)) return remember(cudaErrorInvalidValue);
  *exec = new CUgraphExec_st{std::make_shared<const std::vector<Node>>(graph->nodes)};
  s.execs.insert(*exec);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.lost != cudaSuccess) return remember(s.lost);
  const auto found = find_stream(s, stream, current_device());
  if (!found) return remember(cudaErrorInvalidResourceHandle);
  if (!s.execs.contains(exec)) return remember(cudaErrorInvalidValue);
  if (found->capture) return remember(cudaErrorNotSupported);  // a graph inside a graph
  std::vector<PointPtr> waits;
  if (exec->tail) waits.push_back(exec->tail);
  for (const Node& node : *exec->nodes) {
    if (node.chain && node.chain->tail) waits.push_back(node.chain->tail);
  }
  const cudaError_t error =
      add(s, found, [nodes = exec->nodes] { run_nodes(*nodes); }, nullptr, std::move(waits));
  if (error != cudaSuccess) return remember(error);
  exec->tail = found->tail;
  for (const Node& node : *exec->nodes) {
    if (node.chain) node.chain->tail = found->tail;
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.graphs.erase(graph) == 0) return remember(cudaErrorInvalidValue);
  delete graph;
  s.changed.notify_all();
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.execs.erase(exec) == 0) return remember(cudaErrorInvalidValue);
  delete exec;
  s.changed.notify_all();
  return cudaSuccess;
}
