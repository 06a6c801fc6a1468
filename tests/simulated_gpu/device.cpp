// Simulated accelerators: torch's PrivateUse1 device over the memory of the host.
//
// Every operator runs the CPU's kernel on the same memory, at once. What is like a GPU: N devices, an error where
// devices mix, memory that is counted and limited, random streams of each device, autocast, the kernels of
// SyncBatchNorm, a collective backend, and a count of the moments in which the host waits for the device. What isn't:
// asynchrony, and with it the order of streams; speed; NCCL itself.
#include <torch/csrc/utils/pybind.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/library.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 8;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

int device_count() {
  static int n = [] { auto v = std::getenv("VGPU_COUNT"); return v ? std::min(std::atoi(v), kMaxDevices) : 2; }();
  return n;
}

thread_local c10::DeviceIndex current = 0;
thread_local int64_t stream_of[kMaxDevices] = {0};
std::atomic<int64_t> waits, bytes_read;     // bytes that were copied to the host

c10::DeviceIndex or_current(int i) { return i < 0 ? current : c10::DeviceIndex(i); }

// ---------------------------------------------------------------------------------------------------------- memory
// The ledger is a file that all processes map (VGPU_LEDGER). A process has a row in it, whose bytes are gone with it.

struct Row { std::atomic<int> pid; std::atomic<int64_t> used[kMaxDevices], most[kMaxDevices]; };
struct Ledger { std::atomic<int64_t> limit; Row rows[512]; };

Ledger* ledger() {
  static Ledger* page = [] {
    auto path = std::getenv("VGPU_LEDGER");
    int fd = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
    TORCH_CHECK(!path || (fd >= 0 && ftruncate(fd, sizeof(Ledger)) == 0), "no ledger at ", path);
    int flags = path ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS;
    auto p = mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, flags, fd, 0);
    if (fd >= 0) close(fd);
    return static_cast<Ledger*>(p);
  }();
  return page;
}

bool is_alive(int pid) { return pid && (pid == getpid() || kill(pid, 0) == 0 || errno != ESRCH); }

Row& own_row() {
  static thread_local Row* mine = nullptr;
  int pid = getpid();
  if (mine && mine->pid == pid) return *mine;
  for (auto& row : ledger()->rows) if (row.pid == pid) return *(mine = &row);
  for (auto& row : ledger()->rows) {
    int holder = row.pid;
    if (is_alive(holder) || !row.pid.compare_exchange_strong(holder, pid)) continue;
    for (int i = 0; i < kMaxDevices; i++) row.used[i] = row.most[i] = 0;
    return *(mine = &row);
  }
  TORCH_CHECK(false, "the ledger is full");
}

int64_t used_by_all(int device) {
  int64_t sum = 0;
  for (auto& row : ledger()->rows) if (is_alive(row.pid)) sum += row.used[device];
  return sum;
}

struct Block { void* memory; int64_t size; int device, pid; };

void free_block(void* context) {
  auto block = static_cast<Block*>(context);
  if (block->pid == getpid()) own_row().used[block->device] -= block->size;    // else it is a fork's copy
  std::free(block->memory);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    auto device = current;
    int64_t limit = ledger()->limit;
    TORCH_CHECK_WITH(OutOfMemoryError, !n || !limit || used_by_all(device) + int64_t(n) <= limit,
                     "VGPU out of memory. Tried to allocate ", n, " bytes. GPU ", int(device),
                     " has a total capacity of ", limit, " bytes, of which ", used_by_all(device), " are in use.");
    void* memory = nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, !n || !posix_memalign(&memory, 64, (n+63)/64*64), "VGPU out of host memory");
    auto& row = own_row();
    row.used[device] += n;
    if (row.used[device] > row.most[device]) row.most[device] = row.used[device].load();
    return {memory, new Block{memory, int64_t(n), device, getpid()}, &free_block, c10::Device(kDevice, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
DeviceAllocator allocator;

// Pinned memory is the host's, and remembered
std::map<const char*, size_t> pinned;
std::mutex pinned_lock;

void free_pinned(void* memory) {
  std::lock_guard<std::mutex> lock(pinned_lock);
  pinned.erase(static_cast<char*>(memory));
  std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* memory = nullptr;
    TORCH_CHECK(!posix_memalign(&memory, 64, std::max<size_t>(n, 64)), "out of host memory");
    std::lock_guard<std::mutex> lock(pinned_lock);
    pinned[static_cast<char*>(memory)] = n;
    return {memory, memory, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(pinned_lock);
  auto next = pinned.upper_bound(static_cast<const char*>(data));
  if (next == pinned.begin()) return false;
  auto& [start, n] = *--next;
  return static_cast<const char*>(data) < start + std::max<size_t>(n, 1);
}

// --------------------------------------------------------------------------------- devices, streams, random numbers
// All work is done when an operator returns, so streams and events have nothing to wait for

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device d) const override { auto old = getDevice(); setDevice(d); return old; }
  c10::Device getDevice() const override { return {kDevice, current}; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < device_count(), "no such device: vgpu:", int(d.index()));
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) current = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::Stream getStream(c10::Device d) const noexcept override {
    auto i = or_current(d.index());
    return c10::Stream(c10::Stream::UNSAFE, {kDevice, i}, stream_of[i]);
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, {kDevice, or_current(d.index())});
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    static std::atomic<int> n;
    return c10::Stream(c10::Stream::UNSAFE, {kDevice, or_current(d.index())}, 1 + n++ % 8);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override {
    auto old = getStream(s.device());
    stream_of[s.device_index()] = s.id();
    return old;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { waits++; }
  void synchronizeDevice(const c10::DeviceIndex) const override { waits++; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new int(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { waits++; }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.; }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<int*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct DeviceGenerator : at::CPUGeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex i) { device_ = c10::Device(kDevice, i); key_set_ = kKeys; }
};

at::Generator& generator(int i) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> v;
    for (int k = 0; k < device_count(); k++) v.push_back(at::make_generator<DeviceGenerator>(k));
    return v;
  }();
  return all.at(or_current(i));
}

struct Hooks : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const { return true; }
  bool isAvailable() const { return device_count() > 0; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex i) const override { current = i; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { auto old = current; current = i; return old; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override {
    auto old = current;
    current = or_current(i);
    return old;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return generator(i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    return at::make_generator<DeviceGenerator>(or_current(i));
  }
  at::Device getDeviceFromPtr(void*) const override { return {kDevice, current}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    c10::DeviceGuard guard(storage.device());
    auto memory = allocator.allocate(n);
    std::memcpy(memory.get(), storage.data(), std::min<size_t>(n, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(n);
  }
};

// ----------------------------------------------------------------------------------- tensors that are made and moved

// The same memory as a tensor of the CPU, which keeps the storage alive
at::Tensor as_cpu(const at::Tensor& t) {
  auto storage = t.storage();
  auto bytes = at::from_blob(const_cast<void*>(storage.data()), {int64_t(storage.nbytes())}, [storage](void*) {},
                             at::TensorOptions().dtype(at::kByte));
  auto res = at::empty({0}, t.options().device(at::kCPU).requires_grad(false).pinned_memory(false));
  res.set_(bytes.storage(), t.storage_offset(), t.sizes(), t.strides());
  return res;
}
bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }
at::Tensor host(const at::Tensor& t) { return is_ours(t) ? as_cpu(t) : t; }
std::optional<at::Tensor> host(const std::optional<at::Tensor>& t) {
  return t && t->defined() ? std::optional<at::Tensor>(host(*t)) : t;
}

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using MaybeDevice = std::optional<at::Device>;
using Format = std::optional<at::MemoryFormat>;

c10::Device chosen(MaybeDevice d) { return d && d->index() >= 0 ? *d : c10::Device(kDevice, current); }

at::Tensor empty(at::IntArrayRef size, Dtype dtype, Layout, MaybeDevice d, std::optional<bool>, Format format) {
  c10::DeviceGuard guard(chosen(d));
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Layout, MaybeDevice d,
                         std::optional<bool>) {
  c10::DeviceGuard guard(chosen(d));
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

// A copy of a result of the CPU on a device
at::Tensor up(const at::Tensor& t, c10::Device d) {
  if (!t.defined()) return t;
  auto res = empty_strided(t.sizes(), t.strides(), t.scalar_type(), {}, d, {});
  as_cpu(res).copy_(t);
  return res;
}

thread_local bool in_fallback = false;      // copies of the fallback itself are no waits

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (is_ours(from) != is_ours(to) && !non_blocking && !in_fallback) waits++;
  if (is_ours(from) && !is_ours(to) && !in_fallback) bytes_read += from.nbytes();
  host(to).copy_(host(from).to(to.scalar_type()));
  return to;
}
at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar(const at::Tensor& t) { waits++; return as_cpu(t).item(); }

const at::Tensor& resize(const at::Tensor& t, c10::SymIntArrayRef size, Format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto n = at::detail::computeStorageNbytesContiguous(sizes, t.dtype().itemsize(), t.storage_offset());
  if (n > t.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), n);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return t;
}

at::Tensor& set_storage(at::Tensor& t, at::Storage storage, at::IntArrayRef size, at::IntArrayRef stride, int64_t at) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, std::optional<int64_t>(at));
  return t;
}
at::Tensor& set_to_part(at::Tensor& t, at::Storage storage, c10::SymInt at, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  std::vector<int64_t> strides(sizes.size(), 1);
  if (!stride.empty()) strides = C10_AS_INTARRAYREF_SLOW(stride).vec();
  else for (int64_t i = int64_t(sizes.size())-2; i >= 0; i--)
    strides[i] = strides[i+1]*std::max<int64_t>(sizes[i+1], 1);
  return set_storage(t, std::move(storage), sizes, strides, at.expect_int());
}
at::Tensor& set_to_all(at::Tensor& t, at::Storage storage) {
  int64_t n = storage.nbytes()/t.dtype().itemsize();
  return set_storage(t, std::move(storage), {n}, {1}, 0);
}
at::Tensor& set_to_tensor(at::Tensor& t, const at::Tensor& other) {
  return set_storage(t, other.storage(), other.sizes(), other.strides(), other.storage_offset());
}

at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> at) {
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           at ? std::optional<int64_t>(at->expect_int()) : std::nullopt);
}
at::Tensor unfold(const at::Tensor& t, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(t, dim, size, step);
}

// ------------------------------------------------------------------------------------------------ all other operators

void check_same(c10::Device a, c10::Device b, const std::string& op) {
  TORCH_CHECK(a == b, "Expected all tensors to be on the same device, but found at least two devices, ", a, " and ", b,
              "! (when checking an argument of ", op, ")");
}

using Sizes = c10::SymIntArrayRef;

at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, Sizes stride,
                       Sizes padding, Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups) {
  check_same(x.device(), w.device(), "aten::convolution");
  return up(at::convolution_symint(host(x), host(w), host(b), stride, padding, dilation, transposed, output_padding,
                                   groups), x.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w, Sizes stride, Sizes padding, Sizes dilation,
    bool transposed, Sizes output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  std::vector<c10::SymInt> bias{transposed ? w.sym_size(1)*groups : w.sym_size(0)};
  auto [dx, dw, db] = at::convolution_backward_symint(host(grad), host(x), host(w), Sizes(bias), stride, padding,
                                                      dilation, transposed, output_padding, groups, mask);
  return {up(dx, x.device()), up(dw, x.device()), up(db, x.device())};
}

template <class F> void each_tensor(const c10::IValue& v, F f) {
  if (v.isTensor()) f(v.toTensor());
  else if (v.isTensorList()) for (const at::Tensor& t : v.toTensorList()) f(t);
}

// These take indices or lengths on the CPU beside tensors on a GPU
bool takes_cpu(const std::string& op) {
  return op == "aten::index" || op == "aten::index_put_" || op == "aten::_index_put_impl_" ||
         op.find("lstm") != std::string::npos || op.find("gru") != std::string::npos;
}
// The host can't go on without their result: its size depends on values
bool waits_for(const c10::FunctionSchema& schema, torch::jit::Stack* stack) {
  auto& op = schema.name();
  for (auto o : {"nonzero", "equal", "masked_select", "_unique2"}) if (op == std::string("aten::")+o) return true;
  if (op != "aten::index") return false;
  bool by_mask = false;
  auto indices = torch::jit::last(stack, schema.arguments().size())[1];
  for (std::optional<at::Tensor> t : indices.toOptionalTensorList())
    by_mask |= t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte);
  return by_mask;
}

// An argument as the CPU's kernel takes it, over the same memory
c10::IValue on_host(const c10::IValue& v) {
  if (v.isTensor()) return v.toTensor().defined() ? c10::IValue(host(v.toTensor())) : v;
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorList()) list.push_back(host(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> t : v.toOptionalTensorList()) list.push_back(host(t));
    return list;
  }
  if (v.isDevice() && v.toDevice().type() == kDevice) return c10::Device(at::kCPU);
  return v;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto args = torch::jit::last(stack, schema.arguments().size()).vec();
  std::optional<c10::Device> found;
  for (auto& v : args) each_tensor(v, [&](const at::Tensor& t) {
    if (!is_ours(t)) return;
    if (found) check_same(*found, t.device(), schema.name());
    found = t.device();
  });
  // a number on the CPU is taken as it is, as CUDA does
  if (found && !takes_cpu(schema.name())) for (auto& v : args) each_tensor(v, [&](const at::Tensor& t) {
    if (t.defined() && t.dim() > 0) check_same(*found, t.device(), schema.name());
  });
  if (waits_for(schema, stack)) waits++;
  auto device = found ? *found : c10::Device(kDevice, current);
  c10::DeviceGuard guard(device);
  for (auto& a : schema.arguments()) if (a.kwarg_only() && a.alias_info() && a.alias_info()->isWrite()) {
    in_fallback = true;     // an `out` may be resized, so these run on copies
    try { at::native::cpu_fallback(op, stack); } catch (...) { in_fallback = false; throw; }
    in_fallback = false;
    return;
  }
  auto first = stack->size()-args.size();
  at::Generator used, theirs;     // the device's, and the CPU's in its place
  for (size_t i = 0; i < args.size(); i++) {
    (*stack)[first+i] = on_host(args[i]);
    if (args[i].isGenerator()) used = args[i].toGenerator();
  }
  // random numbers are drawn from the device's generator
  bool draws = false;
  for (size_t i = 0; i < args.size(); i++) {
    auto type = schema.arguments()[i].type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() != c10::TypeKind::GeneratorType) continue;
    draws = true;
    if (!used.defined()) used = generator(device.index());
    theirs = at::make_generator<at::CPUGeneratorImpl>();
    theirs.set_state(used.get_state());
    (*stack)[first+i] = theirs;
  }
  bool hidden = !draws && schema.name().find("dropout") != std::string::npos;    // it draws from the default generator
  at::Generator cpu;
  at::Tensor cpu_state;
  if (hidden) {
    cpu = at::detail::getDefaultCPUGenerator();
    cpu_state = cpu.get_state();
    used = generator(device.index());
    cpu.set_state(used.get_state());
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (draws) used.set_state(theirs.get_state());
  if (hidden) { used.set_state(cpu.get_state()); cpu.set_state(cpu_state); }
  auto start = stack->size()-schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); i++) {
    auto& v = (*stack)[start+i];
    auto alias = schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) {        // an argument that was changed in place
      for (size_t j = 0; j < args.size(); j++) {
        auto of_arg = schema.arguments()[j].alias_info();
        if (of_arg && *of_arg == *alias) { v = args[j]; break; }
      }
    } else if (v.isTensor()) v = up(v.toTensor(), device);
    else if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorList()) list.push_back(up(t, device));
      v = list;
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_to_part);
  m.impl("set_.source_Storage", &set_to_all);
  m.impl("set_.source_Tensor", &set_to_tensor);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("as_strided", &as_strided);
  m.impl("unfold", &unfold);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

// ---------------------------------------------------------------------------------------------------------- autocast
// Products are made in the lower precision, norms and the loss in float32

at::Tensor lower(const at::Tensor& t) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kDevice), t, kDevice);
}
std::optional<at::Tensor> lower(const std::optional<at::Tensor>& t) {
  return t && t->defined() ? std::optional<at::Tensor>(lower(*t)) : t;
}
using NoAutocast = c10::impl::ExcludeDispatchKeyGuard;

at::Tensor cast_linear(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b) {
  NoAutocast guard(c10::DispatchKey::AutocastPrivateUse1);
  return at::linear(lower(x), lower(w), lower(b));
}
at::Tensor cast_matmul(const at::Tensor& a, const at::Tensor& b) {
  NoAutocast guard(c10::DispatchKey::AutocastPrivateUse1);
  return at::matmul(lower(a), lower(b));
}
at::Tensor cast_conv2d(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& b, Sizes stride,
                       Sizes padding, Sizes dilation, c10::SymInt groups) {
  NoAutocast guard(c10::DispatchKey::AutocastPrivateUse1);
  return at::conv2d_symint(lower(x), lower(w), lower(b), stride, padding, dilation, groups);
}
at::Tensor cast_cross_entropy(const at::Tensor& x, const at::Tensor& y, const std::optional<at::Tensor>& w,
                              int64_t reduction, c10::SymInt ignored, double smoothing) {
  NoAutocast guard(c10::DispatchKey::AutocastPrivateUse1);
  return at::cross_entropy_loss_symint(x.to(at::kFloat), y, w, reduction, ignored, smoothing);
}
at::Tensor cast_group_norm(const at::Tensor& x, int64_t groups, const std::optional<at::Tensor>& w,
                           const std::optional<at::Tensor>& b, double eps, bool cudnn) {
  NoAutocast guard(c10::DispatchKey::AutocastPrivateUse1);
  return at::group_norm(x.to(at::kFloat), groups, w, b, eps, cudnn);
}
at::Tensor cast_layer_norm(const at::Tensor& x, Sizes shape, const std::optional<at::Tensor>& w,
                           const std::optional<at::Tensor>& b, double eps, bool cudnn) {
  NoAutocast guard(c10::DispatchKey::AutocastPrivateUse1);
  return at::layer_norm_symint(x.to(at::kFloat), shape, w, b, eps, cudnn);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  m.impl("linear", &cast_linear);
  m.impl("matmul", &cast_matmul);
  m.impl("conv2d", &cast_conv2d);
  m.impl("cross_entropy_loss", &cast_cross_entropy);
  m.impl("group_norm", &cast_group_norm);
  m.impl("layer_norm", &cast_layer_norm);
}

// ------------------------------------------------------------------------ batch norm over ranks: no kernels on the CPU

std::vector<int64_t> all_but_channels(const at::Tensor& x) {
  std::vector<int64_t> dims{0};
  for (int64_t i = 2; i < x.dim(); i++) dims.push_back(i);
  return dims;
}
at::Tensor per_channel(const at::Tensor& v, const at::Tensor& x) {
  std::vector<int64_t> shape(x.dim(), 1);
  shape[1] = v.numel();
  return v.reshape(shape);
}
at::Tensor floats(const at::Tensor& t) { return host(t).to(at::kFloat); }

std::tuple<at::Tensor, at::Tensor> bn_stats(const at::Tensor& input, double eps) {
  auto x = floats(input);
  auto dims = all_but_channels(x);
  return {up(x.mean(dims), input.device()), up((x.var(dims, false)+eps).rsqrt(), input.device())};
}
std::tuple<at::Tensor, at::Tensor> bn_gather(
    const at::Tensor& input, const at::Tensor& means, const at::Tensor& invstds,
    const std::optional<at::Tensor>& running_mean, const std::optional<at::Tensor>& running_var, double momentum,
    double eps, const at::Tensor& counts) {
  auto mean_of = floats(means), var_of = floats(invstds).pow(-2)-eps, n = floats(counts).reshape({-1, 1});
  auto total = n.sum(), mean = (mean_of*n).sum(0)/total;
  auto var = ((var_of+(mean_of-mean).pow(2))*n).sum(0)/total;
  auto move = [&](const std::optional<at::Tensor>& running, const at::Tensor& now) {
    if (running && running->defined()) host(*running).mul_(1-momentum).add_(now*momentum);
  };
  move(running_mean, mean);
  move(running_var, var*total/(total-1));
  return {up(mean, input.device()), up((var+eps).rsqrt(), input.device())};
}
at::Tensor bn_apply(const at::Tensor& input, const std::optional<at::Tensor>& w, const std::optional<at::Tensor>& b,
                    const at::Tensor& mean, const at::Tensor& invstd, double) {
  auto x = floats(input);
  auto res = (x-per_channel(host(mean), x))*per_channel(host(invstd), x);
  if (w && w->defined()) res = res*per_channel(host(*w), x);
  if (b && b->defined()) res = res+per_channel(host(*b), x);
  return up(res.to(input.scalar_type()), input.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> bn_backward_reduce(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& invstd,
    const std::optional<at::Tensor>&, bool, bool, bool) {
  auto g = floats(grad), x = floats(input);
  auto dims = all_but_channels(x);
  auto sum = g.sum(dims), with_x = (g*(x-per_channel(host(mean), x))).sum(dims);
  auto d = input.device();
  return {up(sum, d), up(with_x, d), up(with_x*host(invstd), d), up(sum, d)};
}
at::Tensor bn_backward_apply(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                             const at::Tensor& invstd_, const std::optional<at::Tensor>& w, const at::Tensor& sum,
                             const at::Tensor& with_x, const at::Tensor& counts) {
  auto g = floats(grad), x = floats(input), invstd = host(invstd_);
  auto n = floats(counts).sum();
  auto res = g-per_channel(host(sum)/n, x)
      -(x-per_channel(host(mean), x))*per_channel(host(with_x)/n*invstd*invstd, x);
  res = res*per_channel(invstd, x);
  if (w && w->defined()) res = res*per_channel(host(*w), x);
  return up(res.to(grad.scalar_type()), input.device());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("batch_norm_stats", &bn_stats);
  m.impl("batch_norm_gather_stats_with_counts", &bn_gather);
  m.impl("batch_norm_elemt", &bn_apply);
  m.impl("batch_norm_backward_reduce", &bn_backward_reduce);
  m.impl("batch_norm_backward_elemt", &bn_backward_apply);
}

// -------------------------------------------------------------------- collectives: those of gloo, over the same memory

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors flat(const Tensors& ts) { return ts; }
Tensors flat(const std::vector<Tensors>& lists) {
  Tensors res;
  for (auto& list : lists) res.insert(res.end(), list.begin(), list.end());
  return res;
}

// Gloo's work; its result are the tensors of the device
struct DeviceWork : c10d::Work {
  WorkPtr inner;
  Tensors outputs;
  DeviceWork(WorkPtr w, Tensors o) : inner(std::move(w)), outputs(std::move(o)) {}
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  std::exception_ptr exception() const override { return inner->exception(); }
  // as NCCL's, it returns at once where a stream waits: gloo's results are read by the host, so wait here, too
  bool wait(std::chrono::milliseconds timeout) override { return inner->wait(timeout); }
  void synchronize() override { inner->synchronize(); }
  void abort() override { inner->abort(); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto ours = outputs;
    return inner->getFuture()->then([ours](c10::ivalue::Future& done) -> c10::IValue { done.value(); return ours; },
                                    c10::ListType::create(c10::TensorType::get()));
  }
};

struct Collectives : c10d::Backend {
  c10::intrusive_ptr<c10d::Backend> gloo;
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> b)
      : c10d::Backend(b->getRank(), b->getSize()), gloo(std::move(b)) {}
  const std::string getBackendName() const override { return "vccl"; }

  static at::Tensor cpu(const at::Tensor& t) {
    TORCH_CHECK(is_ours(t), "vccl: No backend type associated with device type ", t.device());
    return as_cpu(t);
  }
  static Tensors cpu(const Tensors& ts) { Tensors res; for (auto& t : ts) res.push_back(cpu(t)); return res; }
  static std::vector<Tensors> cpu(const std::vector<Tensors>& lists) {
    std::vector<Tensors> res;
    for (auto& list : lists) res.push_back(cpu(list));
    return res;
  }
  static WorkPtr work(WorkPtr inner, Tensors outputs) {
    return c10::make_intrusive<DeviceWork>(std::move(inner), std::move(outputs));
  }
  Tensors parts(const at::Tensor& whole) const { return cpu(whole).view({-1}).chunk(getSize()); }

  WorkPtr broadcast(Tensors& ts, const c10d::BroadcastOptions& o) override {
    auto c = cpu(ts);
    return work(gloo->broadcast(c, o), ts);
  }
  // VGPU_P2P says what is wrong with the direct way between GPUs, which NCCL_P2P_DISABLE avoids
  WorkPtr allreduce(Tensors& ts, const c10d::AllreduceOptions& o) override {
    auto wrong = std::getenv("VGPU_P2P"), avoided = std::getenv("NCCL_P2P_DISABLE");
    auto c = cpu(ts);
    auto res = work(gloo->allreduce(c, o), ts);
    if (!wrong || avoided) return res;
    res->wait();
    if (wrong == std::string("hangs")) pause();
    TORCH_CHECK(wrong != std::string("fails"), "NCCL error: peer mapping failed");
    for (auto& t : c) t.zero_();
    return res;
  }
  WorkPtr reduce(Tensors& ts, const c10d::ReduceOptions& o) override {
    auto c = cpu(ts);
    return work(gloo->reduce(c, o), ts);
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    auto c_out = cpu(out);
    auto c_in = cpu(in);
    return work(gloo->allgather(c_out, c_in, o), flat(out));
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& o) override {
    std::vector<Tensors> c_out{parts(out)};
    Tensors c_in{cpu(in).view({-1})};
    return work(gloo->allgather(c_out, c_in, o), {out});
  }
  // gloo sums all of it, and this rank takes its part
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& o) override {
    Tensors whole{cpu(in).clone()};
    c10d::AllreduceOptions all;
    all.reduceOp = o.reduceOp;
    auto done = gloo->allreduce(whole, all);
    done->wait();
    cpu(out).view({-1}).copy_(whole[0].view({-1}).chunk(getSize())[getRank()]);
    return work(std::move(done), {out});
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override { return gloo->barrier(o); }
  WorkPtr send(Tensors& ts, int to, int tag) override { auto c = cpu(ts); return work(gloo->send(c, to, tag), ts); }
  WorkPtr recv(Tensors& ts, int from, int tag) override { auto c = cpu(ts); return work(gloo->recv(c, from, tag), ts); }
};

}  // namespace

namespace { struct RegisterAllocator { RegisterAllocator() { c10::SetAllocator(kDevice, &allocator); } } registered; }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("device_count", &device_count);
  m.def("current_device", [] { return int(current); });
  m.def("set_device", [](int i) {
    TORCH_CHECK(i >= 0 && i < device_count(), "no such device: vgpu:", i);
    current = i;
  });
  m.def("used", [](int i) { return own_row().used[i].load(); });
  m.def("most", [](int i) { return own_row().most[i].load(); });
  m.def("reset_most", [](int i) { own_row().most[i] = own_row().used[i].load(); });
  m.def("used_by_all", &used_by_all);
  m.def("limit", [] { return ledger()->limit.load(); });
  m.def("set_limit", [](int64_t n) { ledger()->limit = n; });
  m.def("waits", [] { return waits.load(); });
  m.def("bytes_read", [] { return bytes_read.load(); });
  m.def("synchronize", [] { waits++; });
  m.def("generator", &generator);
  m.def("wrap", [](c10::intrusive_ptr<c10d::Backend> b) {
    return c10::static_intrusive_pointer_cast<c10d::Backend>(c10::make_intrusive<Collectives>(b));
  });
  // what `t.data = other` does where both devices are the CPU and CUDA
  m.def("set_data", [](at::Tensor t, at::Tensor other) {
    t.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
    if (auto meta = torch::autograd::impl::get_autograd_meta(t)) meta->grad_accumulator_.reset();
  });
}
