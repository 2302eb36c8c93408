"""Every collective on TensorFlow tensors, eagerly and in tf.function, with gradients, against NumPy."""

from __future__ import annotations

import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import collective_core.tensorflow as hvd
import numpy as np
import tensorflow as tf
from common import RANK, SIZE, reduce_in_rank_order, report, values

THREADS = int(sys.argv[1]) if len(sys.argv) > 1 else 0
if THREADS:
    tf.config.threading.set_inter_op_parallelism_threads(THREADS)

hvd.init()
facts: dict[str, object] = {"torch": "torch" in sys.modules}
TYPES = ["uint8", "int8", "int32", "int64", "float16", "float32", "float64"]


def of(rank, shape, dtype, seed=0):
    return values(rank, int(np.prod(shape)), dtype, seed).reshape(shape)


def everyones(shape, dtype, seed=0):
    return [of(rank, shape, dtype, seed) for rank in range(SIZE)]


def same(got, wanted):
    got = np.asarray(got)
    assert got.dtype == wanted.dtype, (got.dtype, wanted.dtype)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    assert np.array_equal(got, wanted), (got, wanted)


def both(function, *tensors):
    """The results of the function, called eagerly, in a tf.function and in one that knows no shapes."""
    unknown = [tf.TensorSpec(None, tensor.dtype) for tensor in tensors]
    yield function(*tensors)
    yield tf.function(function)(*tensors)
    yield tf.function(function, input_signature=unknown)(*tensors)


def reductions():
    for dtype in TYPES:
        parts = everyones((3, 5), dtype)
        for op in ("Sum", "Min", "Max", "Average"):
            for got in both(lambda x, op=op: hvd.allreduce(x, op=op), tf.constant(parts[RANK])):
                same(got, reduce_in_rank_order(parts, op))
    tensor = tf.constant(everyones((4,), "float32")[RANK])
    # bfloat16 is summed in float32 and rounded once
    halves = [tf.cast(part, tf.bfloat16) for part in everyones((4,), "float32")]
    wanted = tf.cast(sum(tf.cast(half, tf.float32) for half in halves[1:]) + tf.cast(halves[0], tf.float32), tf.bfloat16)
    for got in both(lambda x: hvd.allreduce(x, op=hvd.Sum), halves[RANK]):
        assert got.dtype == tf.bfloat16
        assert np.array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))
    scaled = [part * np.float32(0.5) for part in everyones((4,), "float32")]
    for got in both(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0), tensor):
        same(got, reduce_in_rank_order(scaled, "Sum") * np.float32(2))
    assert float(hvd.allreduce(3.0 * (RANK + 1), op=hvd.Sum)) == 3.0 * SIZE * (SIZE + 1) / 2
    assert np.array_equal(hvd.allreduce(tf.Variable([1.0, RANK]), average=False), [SIZE, SIZE * (SIZE - 1) / 2])
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        for got in both(lambda x, c=compression: hvd.allreduce(x, compression=c), tf.fill([3], float(RANK))):
            assert got.dtype == tf.float32
            assert np.allclose(got, (SIZE - 1) / 2)
    flags = [np.array([rank == 0, True, False]) for rank in range(SIZE)]
    for got in both(lambda x: hvd.allreduce(x, op=hvd.Sum), tf.constant(flags[RANK])):
        same(got, flags[0] | np.array([False, True, False]))


def groups():
    kinds = [((2, 3), "float32"), ((4,), "float64"), ((), "float32"), ((0, 2), "float32"), ((300, 300), "float32"), ((5,), "int32")]
    parts = [everyones(shape, dtype, seed) for seed, (shape, dtype) in enumerate(kinds)]
    for got in both(lambda *x: hvd.grouped_allreduce(list(x), op=hvd.Sum), *[tf.constant(part[RANK]) for part in parts]):
        for result, part in zip(got, parts, strict=True):
            same(result, reduce_in_rank_order(part, "Sum"))
    # memory is used again only when no tensor is in it any more
    kept = [hvd.allreduce(tf.fill([100000], float(number + RANK)), op=hvd.Sum) for number in range(6)]
    summed = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    kept += [summed(tf.fill([100000], float(number + RANK))) for number in range(6)]
    for number, tensor in enumerate(kept):
        assert np.all(np.asarray(tensor) == SIZE * (number % 6) + SIZE * (SIZE - 1) / 2), number


def gathers():
    rows = [of(rank, (rank + 1, 2), "float32") for rank in range(SIZE)]
    for got in both(hvd.allgather, tf.constant(rows[RANK])):
        same(got, np.concatenate(rows))
    for got in both(lambda x: hvd.grouped_allgather([x, x * 2]), tf.constant(rows[RANK])):
        same(got[1], np.concatenate(rows) * 2)
    for root in range(SIZE):
        for got in both(lambda x, root=root: hvd.broadcast(x, root), tf.constant(of(RANK, (3, 2), "int64"))):
            same(got, of(root, (3, 2), "int64"))
    # alltoall: rank r sends r + 1 + to rows to each rank `to`
    mine = np.concatenate([np.full((RANK + 1 + to, 2), 10 * RANK + to, "float32") for to in range(SIZE)])
    splits = [RANK + 1 + to for to in range(SIZE)]
    wanted = np.concatenate([np.full((sender + 1 + RANK, 2), 10 * sender + RANK, "float32") for sender in range(SIZE)])
    for received, counts in both(lambda x: hvd.alltoall(x, splits), tf.constant(mine)):
        same(received, wanted)
        same(counts, np.array([sender + 1 + RANK for sender in range(SIZE)], "int32"))
    for got in both(hvd.alltoall, tf.constant([[float(10 * RANK + to)] for to in range(SIZE)])):
        same(got, np.array([[10.0 * sender + RANK] for sender in range(SIZE)], "float32"))
    parts = everyones((2 * SIZE + 1, 2), "float32")
    total, begin = reduce_in_rank_order(parts, "Sum"), [0, 3, *[3 + 2 * n for n in range(1, SIZE)]]
    for got in both(lambda x: hvd.reducescatter(x, op=hvd.Sum), tf.constant(parts[RANK])):
        same(got, total[begin[RANK] : begin[RANK + 1]])
    for got in both(lambda x: hvd.grouped_reducescatter([x, x], op=hvd.Sum), tf.constant(parts[RANK])):
        same(got[1], total[begin[RANK] : begin[RANK + 1]])


def sparse():
    def slices(scale=1.0):
        # index 1 twice on each rank, index 4 on rank 0 alone
        indices = [1, 4, 1] if RANK == 0 else [1, 0, 1]
        return tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]) * (RANK + 1) * scale, tf.constant(indices), [5, 2])

    dense = np.zeros((SIZE, 5, 2), "float32")
    for rank in range(SIZE):
        block = np.array([[1, 2], [3, 4], [5, 6]], "float32") * (rank + 1)
        for index, row in zip([1, 4, 1] if rank == 0 else [1, 0, 1], block, strict=True):
            dense[rank, index] += row
    for function in (lambda: hvd.allreduce(slices()), tf.function(lambda: hvd.allreduce(slices()))):
        got = function()
        assert isinstance(got, tf.IndexedSlices)
        assert np.array_equal(got.indices, [0, 1, 4])
        assert np.allclose(tf.convert_to_tensor(got), dense.sum(0) / SIZE)
    got = hvd.grouped_allreduce([tf.ones([2]), slices(2.0)], op=hvd.Sum)
    assert np.allclose(tf.convert_to_tensor(got[1]), 2 * dense.sum(0))
    assert np.array_equal(got[0], [SIZE, SIZE])
    # Half types are summed and divided in float32, and rounded once: index 0 twice on each rank.
    for dtype in (tf.float16, tf.bfloat16):
        got = hvd.allreduce(tf.IndexedSlices(tf.fill([3, 2], tf.cast([20000.0, 40000.0][RANK % 2], dtype)), tf.constant([0, 1, 0]), [2, 2]))
        wanted = np.mean([2 * float(tf.cast([20000.0, 40000.0][rank % 2], dtype)) for rank in range(SIZE)])
        same(got.values[0], np.asarray(tf.fill([2], tf.cast(wanted, dtype))))
    got = hvd.allreduce(tf.IndexedSlices(tf.constant([[40000.0]], tf.float16), tf.constant([0]), [1, 1]))
    same(got.values, np.array([[40000]], "float16"))
    # Averages of integers are not rounded.
    for dtype, average in (("uint8", "float32"), ("int32", "float64"), ("int64", "float64")):
        got = hvd.allreduce(tf.IndexedSlices(tf.constant([[RANK]], dtype), tf.constant([3]), [5, 1]))
        same(got.values, np.array([[(SIZE - 1) / 2]], average))
    table = tf.Variable(tf.ones([5, 2]))
    for as_dense in (False, True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [RANK, 4, 4]))
        (gradient,) = hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense, op=hvd.Sum).gradient(loss, [table])
        assert isinstance(gradient, tf.IndexedSlices) == (not as_dense)
        wanted = np.zeros((5, 2), "float32")
        wanted[:SIZE] += 1
        wanted[4] += 2 * SIZE
        assert np.array_equal(tf.convert_to_tensor(gradient), wanted)


def gradients():
    weights = tf.constant(of(RANK, (3,), "float64"))
    everyone = np.stack([of(rank, (3,), "float64") for rank in range(SIZE)])

    def gradient_of(function, variable, upstream):
        def run():
            with tf.GradientTape() as tape:
                tape.watch(variable)
                result = function(variable)
            return tape.gradient(result, variable, upstream)

        yield run()
        yield tf.function(run)()

    for op, wanted in (("Sum", everyone.sum(0)), ("Average", everyone.sum(0) / SIZE)):
        for got in gradient_of(lambda x, op=op: hvd.allreduce(x, op=op), tf.ones([3], tf.float64), weights):
            assert np.allclose(got, wanted)
    rows = tf.ones([RANK + 1, 3], tf.float64)
    upstream = tf.constant(np.full((SIZE * (SIZE + 1) // 2, 3), RANK + 1.0))
    for got in gradient_of(hvd.allgather, rows, upstream):
        assert np.array_equal(got, np.full((RANK + 1, 3), (SIZE + 1) / 2))
    for got in gradient_of(lambda x: hvd.broadcast(x, 0), tf.ones([3], tf.float64), weights):
        assert np.allclose(got, everyone.sum(0) / SIZE if RANK == 0 else np.zeros(3))
    for got in gradient_of(lambda x: hvd.alltoall(x), tf.ones([SIZE], tf.float64), tf.fill([SIZE], tf.constant(RANK + 1.0, tf.float64))):
        assert np.array_equal(got, np.arange(1.0, SIZE + 1))
    for op, factor in (("Sum", SIZE), ("Average", 1)):
        for got in gradient_of(
            lambda x, op=op: hvd.reducescatter(x, op=op), tf.ones([SIZE], tf.float64), tf.constant([RANK + 1.0], tf.float64)
        ):
            assert np.array_equal(got, factor * np.arange(1.0, SIZE + 1))


def independent():
    """Collectives of one function that do not depend on each other, in which the ranks are busy for different times."""
    rounds = 20

    @tf.function
    def step(x):
        results = []
        for number in range(rounds):
            busy = tf.linalg.matmul(tf.ones([60 * ((number + RANK) % 3) + 1] * 2), tf.ones([60 * ((number + RANK) % 3) + 1] * 2))
            results.append(hvd.allreduce(x[number] + 0 * busy[0, 0], op=hvd.Sum))
        gathered = hvd.allgather(x[:1])
        return tf.stack(results), gathered, hvd.broadcast(x[:1], SIZE - 1)

    x = np.arange(rounds, dtype="float32")
    for _ in range(3):
        summed, gathered, sent = step(tf.constant(x + RANK))
        same(summed, (SIZE * x + SIZE * (SIZE - 1) // 2).astype("float32"))
        same(gathered, np.arange(SIZE, dtype="float32"))
        same(sent, np.array([SIZE - 1.0], "float32"))


def inside_control_flow():
    @tf.function
    def loop(x):
        for _ in tf.range(3):
            x = hvd.allreduce(x, op=hvd.Sum)
        return hvd.allreduce(x) if tf.reduce_sum(x) > 0 else hvd.allgather(x)

    assert np.array_equal(loop(tf.ones([2])), [SIZE**3] * 2)


def sets():
    even, odd = hvd.add_process_set(range(0, SIZE, 2)), hvd.add_process_set(range(1, SIZE, 2))
    mine = odd if RANK % 2 else even
    members = range(RANK % 2, SIZE, 2)
    for got in both(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=mine), tf.fill([2], float(RANK))):
        assert np.array_equal(got, [sum(members)] * 2)
    for got in both(lambda x: hvd.broadcast(x, members[0], process_set=mine), tf.fill([2], float(RANK))):
        assert np.array_equal(got, [members[0]] * 2)
    assert int(hvd.size_op(even.process_set_id)) == len(range(0, SIZE, 2))
    assert int(hvd.process_set_included_op(odd.process_set_id)) == RANK % 2
    assert hvd.allgather_object(RANK, process_set=mine) == list(members)
    variable = tf.Variable([float(RANK)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * (RANK + 1))
    # ranks outside the set keep their own
    (gradient,) = hvd.DistributedGradientTape(tape, process_set=even, op=hvd.Sum).gradient(loss, [variable])
    assert float(gradient[0]) == (sum(rank + 1 for rank in range(0, SIZE, 2)) if RANK % 2 == 0 else RANK + 1)
    outside = even if RANK % 2 else odd
    try:
        hvd.allreduce(tf.ones([1]), process_set=outside)
    except ValueError as error:
        facts["outside"] = str(error)
    for each in (odd, even):
        assert hvd.remove_process_set(each)


def graphs():
    """Graphs of TensorFlow 1, where nothing orders collectives: as many as threads, and on each rank others first."""
    v1 = tf.compat.v1
    # Each rank brings another one first, and the other one much later, when no thread has waited in the engine before.
    hvd.shutdown()
    hvd.init()
    with tf.Graph().as_default(), v1.Session() as session:
        later = tf.numpy_function(lambda: np.float64(time.sleep(1.0) or 0.0), [], tf.float64)
        tensors = [tf.ones([2]), tf.ones([2])]
        with tf.control_dependencies([later]):
            tensors[RANK % 2] = tf.identity(tensors[RANK % 2])
        for got in session.run([hvd.allreduce(tensor, op=hvd.Sum, name=f"part {number}") for number, tensor in enumerate(tensors)]):
            same(got, np.full([2], SIZE, "float32"))
    with tf.Graph().as_default():
        x = tf.ones([2])
        gradient = tf.gradients(hvd.broadcast(x, 0), x, tf.fill([2], RANK + 1.0))[0]
        parts = [tf.fill([RANK + 1, 2], float(number)) for number in range(6)]
        gathered = [hvd.allgather(part) for part in parts]
        gradients = tf.gradients(gathered, parts, [tf.ones([SIZE * (SIZE + 1) // 2, 2])] * len(parts))
        wanted = [*gathered, *gradients]
        config = v1.ConfigProto(inter_op_parallelism_threads=2, use_per_session_threads=True)
        with v1.Session(config=config) as session:
            # without the control dependency rank 1 would leave its part of the sum out, and rank 0 wait for it
            same(session.run(gradient), np.full([2], (SIZE + 1) / 2 if RANK == 0 else 0, "float32"))
            for _ in range(3):
                got = session.run(wanted if RANK == 0 else wanted[::-1])
                got = got if RANK == 0 else got[::-1]
                for number, part in enumerate(parts):
                    same(got[number], np.full([SIZE * (SIZE + 1) // 2, 2], number, "float32"))
                    same(got[len(parts) + number], np.ones(part.shape, "float32"))


def others():
    assert [int(op()) for op in (hvd.rank_op, hvd.size_op, hvd.local_rank_op, hvd.local_size_op)] == [RANK, SIZE, RANK, SIZE]
    assert [int(each) for each in tf.function(lambda: (hvd.rank_op(), hvd.size_op()))()] == [RANK, SIZE]
    assert hvd.broadcast_object({"from": RANK}, 0) == {"from": 0}
    assert hvd.broadcast_object_fn(SIZE - 1)(RANK) == SIZE - 1
    assert hvd.allgather_object((RANK, "x")) == [(rank, "x") for rank in range(SIZE)]
    variables = [tf.Variable(of(RANK, (3, 2), "float32")), tf.Variable(RANK, dtype=tf.int64), tf.Variable([RANK == 0])]
    hvd.broadcast_variables(variables, root_rank=0)
    same(variables[0], of(0, (3, 2), "float32"))
    assert [int(variables[1]), bool(variables[2][0])] == [0, True]
    assert np.array_equal(hvd.broadcast_([tf.Variable([float(RANK)])], SIZE - 1)[0], [SIZE - 1])
    hvd.barrier()
    # a rank with less data joins; averages are over the others
    if RANK == 0:
        for _ in range(2):
            assert np.array_equal(hvd.allreduce(tf.fill([2], 4.0)), [4.0, 4.0])
    last = int(hvd.join())
    assert last == hvd.broadcast_object(last, 0)


def failures():
    def caught(function):
        try:
            function()
        except Exception as error:  # noqa: BLE001 - TensorFlow's, too
            own = hvd.error_of_engine(error)
            of_tensorflow = [each.__name__ for each in type(error).__mro__ if each.__module__.startswith("tensorflow")]
            return [type(error).__name__, str(error) if own is None else str(own), getattr(own, "kind", None), of_tensorflow]
        return None

    facts["shape"] = caught(lambda: hvd.allreduce(tf.zeros([RANK + 1])))
    facts["shape in a function"] = caught(tf.function(lambda: hvd.allreduce(tf.zeros([RANK + 1]))))
    facts["group"] = caught(lambda: hvd.grouped_allreduce([tf.zeros([2]), tf.zeros([3 if RANK else 4]), tf.zeros([2])], name="pair"))
    facts["number"] = caught(lambda: hvd.grouped_allreduce([tf.zeros([2])] * (RANK + 1), name="several"))
    facts["type"] = caught(lambda: hvd.allreduce(tf.constant([1j]), name="imaginary"))
    facts["type on one rank"] = caught(lambda: hvd.allreduce(tf.constant([1j] if RANK else [1.0]), name="one"))
    facts["type in a function"] = caught(tf.function(lambda: hvd.allreduce(tf.constant(["text"]))))
    facts["sparse"] = caught(lambda: hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), [3 + RANK, 2]), name="table"))
    for op in (hvd.Min, hvd.Max, hvd.Product):
        sliced = caught(lambda op=op: hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), [3, 2]), op=op))
        assert sliced[0] == "NotImplementedError", sliced
    facts["root"] = caught(lambda: hvd.broadcast(tf.ones([1]), 77))
    facts["operation"] = caught(lambda: hvd.allreduce(tf.ones([1]), op="Median"))
    facts["xla"] = caught(tf.function(lambda: hvd.allreduce(tf.ones([1])), jit_compile=True))
    facts["gradient"] = caught(lambda: gradient_of_maximum())
    facts["average and op"] = caught(lambda: hvd.allreduce(tf.ones([1]), average=True, op=hvd.Sum))
    assert np.array_equal(hvd.allreduce(tf.ones([1]), op=hvd.Sum), [SIZE])  # the engine goes on


def gradient_of_maximum():
    x = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        y = hvd.allreduce(x, op=hvd.Max)
    return tape.gradient(y, x)


EVERY = (reductions, groups, gathers, sparse, gradients, independent, inside_control_flow, sets, graphs, others, failures)
for part in EVERY:
    if part.__name__ in sys.argv[2:] or not sys.argv[2:]:
        part()
report(**facts)
hvd.shutdown()
