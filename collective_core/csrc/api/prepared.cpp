// Collectives that a program calls again and again on the same array or tensor, in place: what the first call has found
// out is kept, and the next one is a single function of the interpreter's own kind, which compares the arguments, names
// the operation and runs it. Small tensors spend most of their time in Python otherwise. hvd.allreduce_ is such a
// function itself, so that no argument is sorted either: it goes on to one in Python where nothing is prepared.
//
// The interpreter's functions come as addresses (cc_python), so that this library still is tied to no version of
// Python. Everything here is called with the interpreter's lock held, which also guards what is kept; it is given back
// while the operation runs.
#include <algorithm>
#include <charconv>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "api/process.h"

namespace {

cc_python python{};

// The beginning of DLPack's structures (dlpack.h, version 1), which are a stable interface: what a tensor says of
// itself to another library, without an object of the interpreter's.
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
};
struct DLPackExchangeAPI {
  uint32_t major, minor;
  const void* previous;
  const void* owning[3];  // functions that make tensors
  int (*view)(void* object, DLTensor* tensor);
};

// What must not have changed since the call was prepared: no more than the header says, but for the strides.
class Form {
 public:
  Form() = default;
  explicit Form(const DLTensor& tensor) : tensor_(tensor) {
    lengths_.assign(tensor.shape, tensor.shape + tensor.ndim);
    lengths_.insert(lengths_.end(), tensor.strides, tensor.strides + tensor.ndim);
  }
  bool is_of(const DLTensor& tensor) const {
    const auto ndim = static_cast<size_t>(tensor_.ndim), bytes = ndim * sizeof(int64_t);
    return tensor.data == tensor_.data && tensor.byte_offset == tensor_.byte_offset &&
           tensor.device_type == tensor_.device_type && tensor.type_code == tensor_.type_code &&
           tensor.type_bits == tensor_.type_bits && tensor.type_lanes == tensor_.type_lanes &&
           tensor.ndim == tensor_.ndim && std::memcmp(tensor.shape, lengths_.data(), bytes) == 0 &&
           std::memcmp(tensor.strides, lengths_.data() + ndim, bytes) == 0;
  }

 private:
  DLTensor tensor_{};
  std::vector<int64_t> lengths_;  // shape and strides
};

// A reference to an object of the interpreter's.
class Reference {
 public:
  explicit Reference(void* object) : object_(object) {
    if (object_) python.take(object_);
  }
  Reference(Reference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  Reference& operator=(Reference&&) = delete;
  ~Reference() {
    if (object_) python.drop(object_);
  }
  void* get() const { return object_; }

 private:
  void* object_;
};

// The names of unnamed operations end in a number. Everything before it is hashed and written once.
class NumberedName {
 public:
  explicit NumberedName(const char* prefix)
      : length_(std::min(std::strlen(prefix), cc::name_bytes - max_digits - 1)), hash_(cc::hash_of(prefix)) {}
  void write(cc::Header* header, uint64_t number) const {
    char digits[max_digits + 1] = {};
    const auto end = std::to_chars(digits, digits + max_digits, number).ptr;
    std::memcpy(header->name + length_, digits, static_cast<size_t>(end - digits) + 1);
    header->name_hash = cc::hash_of(digits, hash_);
  }

 private:
  static constexpr size_t max_digits = 20;
  size_t length_;
  uint64_t hash_;
};

// The arguments of a call as the interpreter hands them over: `count` by position, then those that `names` names, a
// tuple of the interpreter's or null.
struct Arguments {
  void* const* given;
  intptr_t count;
  void* names;

  size_t size() const { return static_cast<size_t>(count + (names ? python.size_of(names) : 0)); }
  bool begins_with(const void* object) const { return (count > 0 || names) && given[0] == object; }
};
thread_local const Arguments* in_front = nullptr;  // of the call that has gone on to the function in Python

struct Prepared {
  Prepared(const cc_prepared& asked, std::shared_ptr<cc::Task> made, const std::shared_ptr<cc::Engine>& its_engine)
      : counter(asked.counter),
        name(asked.operation->name),
        names(asked.arguments ? nullptr : in_front->names),
        engine(its_engine),
        task(std::move(made)) {
    const Arguments all = asked.arguments ? Arguments{asked.arguments, asked.arguments_count, nullptr}
                                          : Arguments{in_front->given + 1, in_front->count - 1, in_front->names};
    by_position = all.count;
    for (size_t i = 0; i < all.size(); ++i) arguments.emplace_back(all.given[i]);
    exchange = static_cast<const DLPackExchangeAPI*>(asked.exchange);
    DLTensor tensor{};
    if (exchange && exchange->view(asked.object, &tensor) == 0) form = Form(tensor);
  }

  std::vector<Reference> arguments;
  Reference counter;
  NumberedName name;
  Reference names;
  intptr_t by_position = 0;
  const DLPackExchangeAPI* exchange;
  Form form;
  std::weak_ptr<cc::Engine> engine;
  std::shared_ptr<cc::Task> task;
  bool is_running = false;  // also where another thread, or the handler of a signal, calls it

  // Whether a call with these arguments is the one that was prepared.
  bool fits(void* object, const Arguments& rest) const {
    if (rest.count != by_position || !is_equal(rest.names, names.get())) return false;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!is_equal(rest.given[i], arguments[i].get())) return false;
    }
    if (exchange) {
      DLTensor tensor{};
      if (exchange->view(object, &tensor) != 0) {
        python.clear_error();
        return false;
      }
      if (!form.is_of(tensor)) return false;
    }
    return !is_running && task.use_count() == 1;  // last: what compares arguments may have run this very call
  }

 private:
  static bool is_equal(void* a, void* b) {
    if (a == b) return true;
    if (!a || !b) return false;
    constexpr int equal = 2;  // Py_EQ
    const int answer = python.compare(a, b, equal);
    if (answer < 0) python.clear_error();
    return answer > 0;
  }
};

using Calls = std::unordered_map<const void*, std::shared_ptr<Prepared>>;
Calls& calls() {
  static auto* known = new Calls;  // NOLINT: leaked on purpose, there may be no interpreter any more
  return *known;
}

// What it refers to may run code of the program's when it goes, after it is out of the map.
void forget(const void* object) {
  const auto found = calls().find(object);
  if (found == calls().end()) return;
  const std::shared_ptr<Prepared> gone = std::move(found->second);
  calls().erase(found);
}

constexpr int32_t not_prepared = -1, has_raised = -2;  // nothing has run

// The number of a fault, 0 after a success, or one of these.
int32_t run_if_prepared(const Arguments& all) {
  const auto found = all.count > 0 || all.names ? calls().find(all.given[0]) : calls().end();
  if (found == calls().end()) return not_prepared;
  const std::shared_ptr<Prepared> call = found->second;
  if (!call->fits(all.given[0], {all.given + 1, all.count - 1, all.names})) return not_prepared;
  std::shared_ptr<cc::Engine> engine = call->engine.lock();
  if (!engine) return not_prepared;
  cc::Task& task = *call->task;
  call->is_running = true;
  if (call->counter.get()) {
    void* const number = python.next(call->counter.get());
    if (!number) {
      call->is_running = false;
      return has_raised;
    }
    call->name.write(&task.operation.header, python.as_number(number));
    python.drop(number);
  }
  void* const state = python.release_lock();
  const int32_t fault = cc::guarded([&] {
    const std::shared_ptr<cc::Engine> until_here =
        std::move(engine);  // its end, if it is that, is no time to be locked
    cc::refuse_forked();
    task.renew();
    return cc::run_task(*until_here, call->task);
  });
  python.acquire_lock(state);
  call->is_running = false;
  if (fault) forget(all.given[0]);
  return fault;
}

// run_prepared(object, *arguments): the number of a fault, 0 after a success, None where no such call is prepared.
void* run_prepared(void*, void* const* given, intptr_t count) {
  const int32_t fault = run_if_prepared({given, count, nullptr});
  if (fault == has_raised) return nullptr;
  if (fault >= 0) return python.from_number(fault);
  python.take(python.none);
  return python.none;
}

cc_front front{};

// As front.in_full, which it calls where nothing is prepared.
void* call_front(void*, void* const* given, intptr_t count, void* names) {
  const Arguments all{given, count, names};
  const int32_t fault = run_if_prepared(all);
  if (fault == has_raised) return nullptr;
  if (fault == not_prepared) {
    const Arguments* const outer = std::exchange(in_front, &all);
    void* const result = python.call(front.in_full, given, static_cast<size_t>(count), names);
    in_front = outer;
    return result;
  }
  void* const about = fault ? python.from_number(fault) : python.make_tuple(1, given[0]);
  if (!about) return nullptr;
  void* const arguments[] = {about, given[0]};
  void* const answer = python.call(fault ? front.failed : front.changed, arguments, fault ? 2 : 1, nullptr);
  python.drop(about);
  if (fault || !answer) return answer;
  python.drop(answer);
  python.take(given[0]);
  return given[0];
}

// PyMethodDef
struct MethodDefinition {
  const char* name;
  void* function;
  int flags;
  const char* documentation;
};
constexpr int fast_call = 0x0080, with_names = 0x0002;  // METH_FASTCALL, METH_KEYWORDS
MethodDefinition definition = {"run_prepared", reinterpret_cast<void*>(run_prepared), fast_call, nullptr};
MethodDefinition of_front = {nullptr, reinterpret_cast<void*>(call_front), fast_call | with_names, nullptr};

}  // namespace

void* cc_use_python(const cc_python* interpreter) {
  python = *interpreter;
  return &definition;
}

void* cc_use_front(const cc_front* its_functions) {
  static std::string name, documentation;
  front = *its_functions;
  for (void* const each : {front.in_full, front.changed, front.failed}) python.take(each);  // for ever
  of_front.name = (name = front.name).c_str();
  of_front.documentation = (documentation = front.documentation).c_str();
  return &of_front;
}

int32_t cc_prepare(const cc_prepared* asked) {
  return cc::guarded([&] {
    if (!asked->arguments && !(in_front && in_front->begins_with(asked->object))) return;
    const std::shared_ptr<cc::Engine> engine = cc::engine_of(asked->operation->process_set);
    auto task = cc::make_task(*asked->operation, engine->topology().size);
    forget(asked->object);
    calls()[asked->object] = std::make_shared<Prepared>(*asked, std::move(task), engine);
  });
}

void cc_forget(void* object) {
  if (object) return forget(object);
  Calls gone;
  gone.swap(calls());
}
