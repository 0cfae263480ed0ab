"""What is changed in Horovod 0.28.1 before `scripts/build_horovod.py` compiles it, and why."""

# (file, text in the source distribution, replacement)
EDITS = (
    # Gloo built as C++14 does not link with C++17/20 objects (a constexpr static is defined twice).
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # torch >= 2.12 headers need C++20.
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
    # Debug information is a third of the time to compile, and 30 of 33 MB.
    (
        "CMakeLists.txt",
        'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
        'string(REPLACE "-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
    ),
    # Reading headers is most of the rest: five files are compiled as one. The frameworks' own files, which take longest, are
    # by themselves and come first, as there are 25 others. Sources for CUDA have not been tried so.
    (
        "CMakeLists.txt",
        "set(CMAKE_CXX_EXTENSIONS OFF)\n",
        "set(CMAKE_CXX_EXTENSIONS OFF)\nif(NOT DEFINED ENV{HOROVOD_GPU_OPERATIONS})\n  set(CMAKE_UNITY_BUILD ON)\n"
        "  set(CMAKE_UNITY_BUILD_BATCH_SIZE 5)\nendif()\n",
    ),
    (  # has a name that the file after it has, too
        "third_party/gloo/gloo/CMakeLists.txt",
        "# Install if necessary.\n",
        "set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/allreduce.cc PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)\n"
        "# Install if necessary.\n",
    ),
    # TensorFlow had a second Gloo, as C++17. The first is that now.
    ("CMakeLists.txt", "if(HAVE_GLOO AND (DEFINED Tensorflow_CXX17 AND Tensorflow_CXX17))", "if(FALSE)"),
    ("horovod/tensorflow/CMakeLists.txt", "TF_LINKER_LIBS compatible17_gloo", "TF_LINKER_LIBS gloo"),
    # Horovod imports torch eight times to ask it where it is. `build_horovod.py` knows without importing it, so that it can be
    # compiled while the libraries that torch needs are still downloaded.
    (
        "cmake/Modules/FindPytorch.cmake",
        'execute_process(COMMAND ${PY_EXE} -c "import torch; print(torch.__version__)"\n',
        "if(DEFINED ENV{HOROVOD_TORCH_FOLDER})\n"
        "    set(Pytorch_VERSION $ENV{HOROVOD_TORCH_VERSION})\n"
        "    set(Pytorch_CUDA FALSE)\n    set(Pytorch_ROCM FALSE)\n    set(Pytorch_CXX11 TRUE)\n"
        '    set(Pytorch_COMPILE_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=1")\n'
        "    set(Pytorch_INCLUDE_DIRS $ENV{HOROVOD_TORCH_FOLDER}/include\n"
        "        $ENV{HOROVOD_TORCH_FOLDER}/include/torch/csrc/api/include)\n"
        "    foreach(_LIB c10 torch torch_cpu torch_python)\n"
        "        list(APPEND Pytorch_LIBRARIES $ENV{HOROVOD_TORCH_FOLDER}/lib/lib${_LIB}.so)\n    endforeach()\n"
        "    set(PYTORCH_FOUND TRUE)\n    return()\nendif()\n"
        'execute_process(COMMAND ${PY_EXE} -c "import torch; print(torch.__version__)"\n',
    ),
    # These XLA ops serve CUDA only, and TensorFlow wheels no longer ship all their headers.
    (
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")',
        "",
    ),
    # When a reduction fails, Horovod reports it and goes on to negotiate the next one over the same connections. What a
    # peer still sends of the failed one then arrives in place of a negotiation, and Gloo aborts the process: a survivor
    # of somebody else's death dies too, now and then. With these the background loop ends instead.
    (
        "horovod/common/operations.cc",
        "  Status status;\n  try {\n    // process_set is passed here only",
        "  Status status;\n  std::exception_ptr failure;\n  try {\n    // process_set is passed here only",
    ),
    (
        "horovod/common/operations.cc",
        '        << "ExecuteOperation Failed";\n',
        '        << "ExecuteOperation Failed";\n    failure = std::current_exception();\n',
    ),
    (
        "horovod/common/operations.cc",
        "      e.FinishWithCallback(status);\n    }\n  }\n}\n\n#if HAVE_MPI\nvoid EnrichProcessSetWithMPIController",
        "      e.FinishWithCallback(status);\n    }\n  }\n  if (failure) {\n    std::rethrow_exception(failure);\n  }\n}\n\n"
        "#if HAVE_MPI\nvoid EnrichProcessSetWithMPIController",
    ),
    # When a peer dies while a world is being connected, Gloo's exception leaves the background thread and aborts the
    # process. With these `hvd.init()` raises instead, and may be called again.
    (
        "horovod/common/operations.cc",
        "    horovod_global.initialization_done = false;\n    horovod_global.background_thread =\n"
        "        std::thread(BackgroundThreadLoop, std::ref(horovod_global));\n",
        "    horovod_global.initialization_done = false;\n    horovod_global.initialization_failed = false;\n"
        "    horovod_global.background_thread = std::thread([](HorovodGlobalState& state) {\n"
        "      try {\n        BackgroundThreadLoop(state);\n      } catch (const std::exception& ex) {\n"
        '        LOG(ERROR) << "Horovod could not be initialized: " << ex.what();\n'
        "        state.shut_down = true;\n#if HAVE_GLOO\n"
        "        state.process_set_table.Finalize(global_gloo_context, SHUT_DOWN_ERROR);\n"
        "        global_gloo_context.Finalize();\n#endif\n"
        "        state.initialization_failed = true;\n      }\n    }, std::ref(horovod_global));\n",
    ),
    # The store answers 410 for a world that is broken: asking again, each 500 ms, is for servers that are busy.
    (
        "horovod/common/gloo/http_store.cc",
        "      if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {\n",
        "      if (response.status == 410) {\n        break;\n      }\n"
        "      if (response.status != HTTP_OK && response.status != HTTP_NOT_FOUND) {\n",
    ),
    # When a connection ends, Gloo wakes who waits for an operation that has not begun, but not who waits for one of which a
    # part was sent or received: after a peer froze in the middle of it a survivor waited out the timeout of 30 s.
    (
        "third_party/gloo/gloo/transport/tcp/pair.cc",
        "      op.buf->signalException(ex);\n    }\n  }\n",
        "      op.buf->signalException(ex);\n    }\n    NonOwningPtr<UnboundBuffer> sent(op.ubuf);\n    if (sent) {\n"
        "      sent->signalException(ex);\n    }\n  }\n  NonOwningPtr<UnboundBuffer> received(rx_.ubuf);\n"
        "  if (received) {\n    received->signalException(ex);\n  }\n",
    ),
    # A process set, and the one of all processes is one, looked for its address by the host's name and not by the interface
    # that was asked for: it may be another network's, and Gloo crashes where the name does not resolve.
    (
        "horovod/common/gloo/gloo_context.cc",
        "  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n  auto dev = CreateDevice(device_attr);\n\n"
        "  global_ctx = global_context.ctx;\n",
        "  gloo_iface_ = global_context.gloo_iface_;\n  device_attr.iface = gloo_iface_;\n"
        "  device_attr.ai_family = AF_UNSPEC;\n  auto dev = CreateDevice(device_attr);\n\n"
        "  global_ctx = global_context.ctx;\n",
    ),
    # The process set of all had connections of its own, beside those of the same processes in the same order; the next
    # `init` closed them, which now `shutdown` does.
    (
        "horovod/common/gloo/gloo_context.cc",
        "  assert(global_context.IsEnabled());\n\n",
        "  assert(global_context.IsEnabled());\n\n  if (registered_ranks.empty()) {\n    *this = global_context;\n"
        "    return;\n  }\n\n",
    ),
    # Who is alone in its group, here among those of a host and of a local rank, has nobody to ask the store for.
    (
        "horovod/common/gloo/gloo_context.cc",
        "  if (server_addr_env != nullptr) {\n",
        "  if (server_addr_env != nullptr && size > 1) {\n",
    ),
    # Each rank waited for the names of all hosts before it published its addresses. Nothing uses what they are for.
    (
        "third_party/gloo/gloo/rendezvous/context.cc",
        "  store.set(localKey, value);\n\n  for (int i = 0; i < size; i++) {\n    if (i == rank) {\n      break;\n    }\n\n"
        '    std::string key("rank_" + std::to_string(i));\n    auto val = store.get(key);\n'
        "    auto hostName = std::string((const char*)val.data(), val.size());\n\n"
        "    if (hostName == localHostName) {\n      localRank++;\n    }\n  }\n",
        "",
    ),
    # What has been waited for is there: the store was asked for it a second time.
    (
        "horovod/common/gloo/http_store.h",
        "  int rank_;\n",
        "  int rank_;\n  std::map<std::string, std::vector<char>> found_;\n",
    ),
    (
        "horovod/common/gloo/http_store.cc",
        "    if (!HTTP_GET(key, result)) {\n      return false;\n    }\n",
        "    if (!HTTP_GET(key, result)) {\n      return false;\n    }\n    found_[key] = result;\n",
    ),
    (
        "horovod/common/gloo/http_store.cc",
        "  std::vector<char> result;\n  HTTP_GET(key, result);\n",
        "  auto found = found_.find(key);\n  if (found != found_.end()) {\n    return found->second;\n  }\n"
        "  std::vector<char> result;\n  HTTP_GET(key, result);\n",
    ),
    # Gloo's thread looks up each 10 ms, and who takes a socket from it, for each connection to a peer, or ends it, waited for
    # that. These wake it.
    (
        "third_party/gloo/gloo/transport/tcp/loop.cc",
        "    cv_.wait(lock);\n",
        "    defer([] {});\n    cv_.wait(lock);\n",
    ),
    (  # never between those two lines
        "third_party/gloo/gloo/transport/tcp/loop.cc",
        "    cv_.notify_all();\n",
        "    { std::lock_guard<std::mutex> guard(m_); }\n    cv_.notify_all();\n",
    ),
    (
        "third_party/gloo/gloo/transport/tcp/loop.cc",
        "    done_ = true;\n",
        "    done_ = true;\n    defer([] {});\n",
    ),
    # Horovod's background thread meets those of all other ranks each millisecond, also when there is nothing to sum: with small
    # steps a fifth of a core. With HOROVOD_IDLE_CYCLE_TIME (ms; 0, the default, changes nothing) it waits that long for work.
    (
        "horovod/common/tensor_queue.h",
        "#include <iostream>\n#include <mutex>\n",
        "#include <atomic>\n#include <chrono>\n#include <condition_variable>\n#include <iostream>\n#include <mutex>\n",
    ),
    (
        "horovod/common/tensor_queue.h",
        "  void RemoveJoinTensor();\n\nprotected:\n",
        "  void RemoveJoinTensor();\n\n  // Until there is an entry, `stop` is set and Wake called, or this time is over.\n"
        "  void WaitForEntry(std::chrono::microseconds longest, const std::atomic_bool& stop);\n\n  void Wake();\n\n"
        "protected:\n  std::condition_variable added_;\n\n",
    ),
    (
        "horovod/common/tensor_queue.cc",
        "  message_queue_.push(std::move(message));\n  return Status::OK();\n",
        "  message_queue_.push(std::move(message));\n  added_.notify_all();\n  return Status::OK();\n",
    ),
    (
        "horovod/common/tensor_queue.cc",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  return Status::OK();\n",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  added_.notify_all();\n  return Status::OK();\n",
    ),
    (
        "horovod/common/tensor_queue.cc",
        "// Execute callback for each tensor and clear tensor queue\n",
        "void TensorQueue::WaitForEntry(std::chrono::microseconds longest,\n"
        "                               const std::atomic_bool& stop) {\n"
        "  std::unique_lock<std::mutex> lock(mutex_);\n"
        "  added_.wait_for(lock, longest, [&] { return stop || !tensor_table_.empty(); });\n}\n\n"
        "void TensorQueue::Wake() {\n  std::lock_guard<std::mutex> guard(mutex_);\n  added_.notify_all();\n}\n\n"
        "// Execute callback for each tensor and clear tensor queue\n",
    ),
    (
        "horovod/common/operations.cc",
        "    std::this_thread::sleep_for(sleep_duration);\n  }\n  state.last_cycle_start = std::chrono::steady_clock::now();\n",
        "    std::this_thread::sleep_for(sleep_duration);\n  }\n"
        "  if (state.idle_cycle_time.count() > 0 && state.process_set_table.Ids().size() == 1) {\n"
        "    state.process_set_table.Get(0).tensor_queue.WaitForEntry(state.idle_cycle_time, state.shut_down);\n  }\n"
        "  state.last_cycle_start = std::chrono::steady_clock::now();\n",
    ),
    (
        "horovod/common/operations.cc",
        "  // Override response cache capacity, if it's set.\n",
        "  state.idle_cycle_time =\n"
        '      std::chrono::microseconds(long(GetDoubleEnvOrDefault("HOROVOD_IDLE_CYCLE_TIME", 0.0) * 1000.));\n\n'
        "  // Override response cache capacity, if it's set.\n",
    ),
    (
        "horovod/common/global_state.h",
        "  std::chrono::steady_clock::time_point last_cycle_start;\n",
        "  std::chrono::steady_clock::time_point last_cycle_start;\n\n"
        "  // How long to wait for something to reduce, beyond the cycle; 0: not at all.\n"
        "  std::chrono::microseconds idle_cycle_time{0};\n",
    ),
    (
        "horovod/common/operations.cc",
        "    horovod_global.shut_down = true;\n    horovod_global.background_thread.join();\n",
        "    horovod_global.shut_down = true;\n    horovod_global.process_set_table.Get(0).tensor_queue.Wake();\n"
        "    horovod_global.background_thread.join();\n",
    ),
    # With NCCL, a world that is broken while its sums are under way on the GPU: its communicators are aborted, by which the
    # GPU comes to the end of the sums, and whoever waited took them for complete. So all who wait are told before, those in
    # the queue included, and nobody looks at a communicator that is gone.
    (
        "horovod/common/ops/nccl_operations.cc",
        "void NCCLOpContext::AsyncErrorCheck() {\n",
        "void NCCLOpContext::AsyncErrorCheck() {\n  if (nccl_context_->elastic && global_state_->shut_down) {\n"
        '    throw std::logic_error("Horovod has been shut down");\n  }\n',
    ),
    (
        "horovod/common/operations.cc",
        "  // Finalize all contexts\n#if HAVE_NCCL\n",
        "  // Finalize all contexts\n#if HAVE_GPU\n  state.shut_down = true;\n  gpu_context.Finalize();\n#endif\n#if HAVE_NCCL\n",
    ),
    (
        "horovod/common/thread_pool.cc",
        "  while (running_) {\n    std::unique_lock<std::mutex> lock(mutex_);\n"
        "    cond_.wait(lock, [this] {return !(running_ && work_queue_.empty());});\n    if (!running_) break;\n",
        "  while (true) {\n    std::unique_lock<std::mutex> lock(mutex_);\n"
        "    cond_.wait(lock, [this] {return !(running_ && work_queue_.empty());});\n    if (work_queue_.empty()) break;\n",
    ),
    (  # the end of the world aborts it, a second time
        "horovod/common/ops/nccl_operations.cc",
        "    ncclCommAbort(nccl_comm);\n    throw",
        "    throw",
    ),
)
