// The C interface that Python opens with ctypes. Plain numbers and pointers: no Python, no C++ type, no exception
// crosses it.
//
// There is one engine per process and process set; set 0 holds all ranks of the job. Functions return 0 or a fault
// number of errors.h; cc_last_error tells the sentence, per thread. All functions may be called from any thread. After
// fork() the child's calls fail with `closed`.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "transport/external/transfer.h"

#define CC_API extern "C" __attribute__((visibility("default")))

// Raised with every change of a function or structure below; _native.py refuses a library with another number.
constexpr int32_t cc_abi = 19;

struct cc_peer {
  int32_t rank;         // in the process set
  int32_t global_rank;  // in the job
  int32_t port;
  int32_t reserved;
  int64_t pid;
  const char* host_id;      // equal for two ranks exactly when they can share memory
  const char* host_name;    // for messages
  const char* address;      // numeric, or empty
  const char* rails;        // further addresses, each after a comma
  const char* socket_name;  // from cc_open
};

struct cc_operation {
  int32_t kind;  // numbers of types.h
  int32_t dtype;
  int32_t reduce;
  int32_t root;
  int32_t ndim;
  int32_t process_set;
  const int64_t* dims;
  uint64_t count;     // elements on this rank
  const void* input;  // must stay alive and unchanged until the operation is done
  // May be input (not for reducescatter); null for alltoall. Of an allgather null, or memory for what all ranks send,
  // which is used if all send as much as this one; then input may be this rank's part of it.
  void* output;
  double prescale;
  double postscale;
  const char* name;                // the same on all ranks
  const int64_t* splits;           // alltoall: rows for each rank; otherwise null
  const char* unsupported_reason;  // why this rank cannot run it, which every rank is then told; or null
  int32_t device;                  // where the caller's tensor lies, a number of types.h
  int32_t tag;                     // of the caller's own, for cc_transfer; not 0
  uint32_t fused;  // a checksum of the tensors that the caller has put into this one, compared like the shape, or 0
  uint32_t inner;  // 1: of the caller's own agreements: under Horovod's semantics, too, it runs while a rank has joined
  uint32_t ordered;  // 1: its transport is asked for a number (cc_start); it is enough that one rank says so
};

CC_API int32_t cc_abi_version();
CC_API const char* cc_version();
CC_API const char* cc_kernels();  // which instruction set sums
CC_API const char* cc_last_error();
CC_API int32_t cc_last_error_has_one_name();  // a disagreement on an operation that has one name on all ranks
CC_API int32_t cc_last_error_ranks(int32_t* ranks, int32_t capacity);  // to blame for it; returns how many

// How signals end waits of the main thread (interruption.h): functions of the interpreter. An operation whose wait was
// ended has the fault `interrupted`; then cc_take_raised gives what the handler has raised, for PyErr_Restore.
CC_API void cc_watch_signals(int (*acquire)(), void (*release)(int), int (*run_handlers)(),
                             void (*fetch)(void**, void**, void**));
CC_API void cc_take_raised(void** type_value_traceback);
// 1 in a handler that runs in a wait of this thread's, where no operation can be waited for.
CC_API int32_t cc_in_handler();

// "name address prefix-length" lines of this host's interfaces that are up.
CC_API int32_t cc_interfaces(char* text, uint64_t capacity);

// Opens the listeners. `address`: numeric, where other hosts can reach this one, or null when all ranks share this
// host. `rails`: as a peer's.
CC_API int32_t cc_open(const char* address, const char* rails, int32_t* port, char* socket_name, uint64_t capacity);
// Connects to all peers of a process set. `timeout`: seconds without progress that end a collective; `start_timeout`:
// seconds for connecting.
// `stall_warning`: seconds of waiting after which a rank says on stderr for whom it waits; 0: never. `sockets`: data
// connections from one rank to another, the same on all ranks. `single_copy`: 0 when this rank does not
// want cross-memory attach between the ranks of its host. `semantics`: a number of types.h, and `by_host`, whether sums
// are formed host by host (mesh.cpp): the same on all ranks.
CC_API int32_t cc_connect(int32_t process_set, int32_t rank, int32_t size, const cc_peer* peers, const uint8_t* secret,
                          uint64_t secret_bytes, double timeout, double start_timeout, double stall_warning,
                          int32_t sockets, int32_t single_copy, int32_t semantics, int32_t by_host);
// Who moves tensors of this device (a number of types.h) from now on; null: the engine itself. gpu_memory has no
// other than an external transport, for which an operation is done when it is under way on the GPU's own stream.
CC_API int32_t cc_use_external_transport(int32_t device, cc_start start, cc_test test);

// Between operations: learns of ranks that died and of failures that were announced, which end the engine. An operation
// that is under way looks itself.
CC_API int32_t cc_check_peers(int32_t process_set);

// What waits for this rank of the job ends, in all process sets: the launcher says that it is gone. From any thread.
CC_API int32_t cc_give_up(int32_t rank);

// Copies bytes that are not read again soon, past the caches. The two must not overlap.
CC_API void cc_copy(void* target, const void* source, uint64_t bytes);
// *has: 1 when the ranks of this host have cross-memory attach (cross_memory.h).
CC_API int32_t cc_has_cross_memory(int32_t process_set, int32_t* has);

// Leaves a process set; leaving set 0 leaves all.
CC_API int32_t cc_close(int32_t process_set);

// Blocking; not for operations with results of their own: allgather, alltoall, join.
CC_API int32_t cc_run(const cc_operation* operation);
// Calls on an array or tensor that are repeated (prepared.cpp), with the interpreter's lock held. Functions of the
// interpreter that they need: Py_IncRef, Py_DecRef, PyObject_RichCompareBool, PyErr_Clear, PyIter_Next,
// PyLong_AsUnsignedLongLong, PyLong_FromLong, PyEval_SaveThread, PyEval_RestoreThread, PyObject_Size, PyTuple_Pack,
// PyObject_Vectorcall (null before Python 3.9, which has no front), and None.
struct cc_python {
  void (*take)(void* object);
  void (*drop)(void* object);
  int (*compare)(void* a, void* b, int how);
  void (*clear_error)();
  void* (*next)(void* iterator);
  unsigned long long (*as_number)(void* object);
  void* (*from_number)(long number);
  void* (*release_lock)();
  void (*acquire_lock)(void* state);
  intptr_t (*size_of)(void* object);
  void* (*make_tuple)(intptr_t count, ...);
  void* (*call)(void* function, void* const* arguments, size_t count, void* names);
  void* none;
};
// Returns the definition (PyMethodDef) of a function of the interpreter's: run_prepared(object, *arguments) runs what
// was prepared for the object with equal arguments, and returns the fault's number; None where there is nothing such.
CC_API void* cc_use_python(const struct cc_python* interpreter);
// Functions of the interpreter's behind one more such definition, whose calls are in_full's: a call that was prepared
// runs, calls `changed` with a tuple of its object, and returns the object; after a fault it returns what `failed`
// returns of the number and the object. There is one front in a process.
struct cc_front {
  void* in_full;
  void* changed;
  void* failed;
  const char* name;
  const char* documentation;
};
CC_API void* cc_use_front(const struct cc_front* its_functions);
struct cc_prepared {
  void* object;            // that is read and written; it must be forgotten before it ends
  void* const* arguments;  // null: those of the front, if it is calling in_full; else nothing is prepared
  int32_t arguments_count;
  int32_t reserved;
  const struct cc_operation* operation;  // copied
  void* counter;  // an iterator of the interpreter's: its next number ends the operation's name; or null
  const void*
      exchange;  // the object's DLPackExchangeAPI, to see whether it is still what it was; null: it cannot change
};
CC_API int32_t cc_prepare(const struct cc_prepared* asked);
CC_API void cc_forget(void* object);  // null: all

// How an operation is submitted. cc_queued: returns at once. cc_blocking: returns when it is done. cc_alone: returns at
// once, and the caller submits nothing else until it is done, so that ranks that wait for something else learn that it
// will not come. cc_among: returns at once; whoever waits for it, others may submit something meanwhile.
enum cc_way : int32_t { cc_queued, cc_blocking, cc_alone, cc_among };
// *handle > 0. Every handle must be released.
CC_API int32_t cc_submit(const cc_operation* operation, cc_way way, int64_t* handle);
CC_API int32_t cc_is_done(int64_t handle, int32_t* done);
// Waits at most `seconds`; then, if *done, returns the operation's own fault.
CC_API int32_t cc_wait(int64_t handle, double seconds, int32_t* done);
// Of a finished allgather or alltoall: the bytes received (valid until the release; none of gpu_memory, which its
// external transport keeps) and the rows from each rank; of a join: the rank that joined last. `received` has
// `capacity` numbers.
CC_API int32_t cc_gathered(int64_t handle, void** data, uint64_t* bytes, int64_t* received, int32_t capacity);
CC_API int32_t cc_release(int64_t handle);

// Memory that all ranks of the host reduce where it lies, page-aligned; valid until cc_free, also after cc_close.
// `pages`: 0 from the first touch, 1 large ones at once, 2 likewise, which the next block of this length gets.
CC_API int32_t cc_allocate(uint64_t bytes, int32_t pages, void** address);
CC_API int32_t cc_free(void* address);

// The recorder of operations (recorder.h). `path`: a file that is to hold it, or null for memory. Before cc_connect.
CC_API int32_t cc_record(const char* path);
// Copies finished events from number `from` on, in order, up to the first unfinished one. *next: where to go on;
// numbers below it that were not copied are lost. *waited_ns: that callers have spent waiting so far.
CC_API int32_t cc_events(uint64_t from, void* events, int32_t capacity, int32_t* count, uint64_t* next,
                         uint64_t* waited_ns);
// This rank's timeline. While it is on, somebody waits for events from number `from` on, at most so many seconds, or
// until they are many; *on: whether it still is. At its end, once all operations of set 0 that were submitted are done
// (at most so many seconds; else *ended is 0 and it stays on), *of_all: whether all ranks have recorded at a time.
CC_API int32_t cc_begin_timeline();
CC_API int32_t cc_await_events(uint64_t from, double seconds, int32_t* on);
CC_API int32_t cc_end_timeline(double seconds, int32_t* ended, int32_t* of_all);

// What the exchanges of operation headers between hosts have cost this rank since it joined the process set: exchanges,
// steps, messages sent, bytes sent. Zeros unless it is the first rank of one of several hosts.
CC_API int32_t cc_traffic(int32_t process_set, uint64_t* four);

// What this process has done since it began, also as a member of jobs that it has left. Numbers never fall.
struct cc_kind_counters {
  int32_t process_set;
  int32_t kind;         // a number of types.h
  uint64_t operations;  // that have ended, well or not
  uint64_t failed;      // of these
  uint64_t bytes;       // of this rank's tensors
  uint64_t queue_ns;    // behind other operations of this rank
  uint64_t peers_ns;    // until all ranks had come to the operation, and knew it; small tensors come along
  uint64_t hosts_ns;    // of this: for other hosts, on the first rank of one of several
  uint64_t transfer_ns;
};
// *count: rows there are, one for each process set and kind of which there was an operation; at most `capacity` are
// written.
CC_API int32_t cc_counters(struct cc_kind_counters* rows, int32_t capacity, int32_t* count);
struct cc_waited_for {
  int32_t rank;  // of the job at that time, on this host
  int32_t reserved;
  uint64_t peers_ns;  // of operations to which it came last of this host
};
CC_API int32_t cc_late_ranks(struct cc_waited_for* rows, int32_t capacity, int32_t* count);
struct cc_use {
  uint64_t waited_ns;    // that callers have waited for collectives
  uint64_t arena_bytes;  // of this rank's part of the arena: allocated now; zeros without an arena
  uint64_t arena_most;   // at most since the rank has joined
  uint64_t arena_all;    // that can be
};
CC_API int32_t cc_resources(struct cc_use* use);

// Cores that the control group of a process may use, infinite without a limit (cores.h). "root": where proc is.
CC_API double cc_core_quota(int64_t process, const char* root);

// For tests of the arithmetic without a job: out = in[0] op in[1] ... as the engine does it.
CC_API int32_t cc_reduce(int32_t dtype, int32_t reduce, int32_t divisor, double prescale, double postscale, void* out,
                         const void* const* in, int32_t inputs, uint64_t count);
// For tests of the handshake: 32 bytes.
CC_API void cc_hmac_sha256(const uint8_t* key, uint64_t key_bytes, const uint8_t* message, uint64_t message_bytes,
                           uint8_t* digest);
