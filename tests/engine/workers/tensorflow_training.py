"""Tapes, optimizers, states and batch normalisation of collective_core.tensorflow; what they should give is computed without the engine."""

from __future__ import annotations

import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
import collective_core.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from common import RANK, SIZE, report

hvd.init()
facts: dict[str, object] = {}


def refused(function, *errors):
    try:
        function()
    except errors as error:
        return str(error)
    raise AssertionError("nothing was refused")


def data(rank):
    generator = np.random.default_rng(rank)
    x = generator.standard_normal((8, 4)).astype("float32")
    return x, x @ np.arange(4, dtype="float32")[:, None]


def model():
    keras.utils.set_random_seed(RANK)  # so that only a broadcast makes the ranks alike
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])


def squares(net, rank):
    x, y = data(rank)
    return tf.reduce_mean(tf.square(net(x) - y))


def reference_gradients(net):
    """The average of what every rank's data give with this rank's weights, which are the same everywhere."""
    found = []
    for rank in range(SIZE):
        with tf.GradientTape() as tape:
            loss = squares(net, rank)
        found.append(tape.gradient(loss, [v.value for v in net.trainable_variables]))
    return [sum(np.asarray(each) for each in parts) / SIZE for parts in zip(*found, strict=True)]


def close(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=1e-6)


def tapes():
    net = model()
    hvd.broadcast_variables(net.variables, root_rank=0)
    assert len({np.asarray(each).tobytes() for each in hvd.allgather_object(np.asarray(net.variables[0]))}) == 1
    variables, wanted = net.trainable_variables, reference_gradients(net)
    options = (
        {},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"groups": [[variables[0], variables[1]], [variables[3]]]},
        {"op": hvd.Average, "compression": hvd.Compression.none},
    )

    def gradients(**options):
        with tf.GradientTape() as tape:
            loss = squares(net, RANK)
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, variables)

    for each in options:
        close(gradients(**each), wanted)
        close(tf.function(lambda each=each: gradients(**each))(), wanted)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = squares(net, RANK)
    close(tape.gradient(loss, variables), wanted)
    close([tape.gradient(loss, variables[0])], wanted[:1])
    named = tape.gradient(loss, {"a": variables[0], "b": variables[1]})
    close([named["a"], named["b"]], wanted[:2])
    assert tape.gradient(loss, [variables[0], tf.Variable(1.0)])[1] is None
    # gradients of a local layer are this rank's own, weighed as an average
    with tf.GradientTape() as tape:
        loss = squares(net, RANK)
    with tf.GradientTape() as own:
        alone = squares(net, RANK)
    mine = own.gradient(alone, variables)
    got = hvd.PartialDistributedGradientTape(tape, local_layers=net.layers[0]).gradient(loss, variables)
    close(got, [*(np.asarray(each) / SIZE for each in mine[:2]), *wanted[2:]])
    refused(lambda: hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0), ValueError)
    refused(lambda: hvd.DistributedGradientTape(tf.GradientTape(), groups=-1), ValueError)


def keras_optimizers():
    for passes, average in ((1, False), (2, False), (2, True)):
        net = model()
        hvd.broadcast_variables(net.variables, root_rank=0)
        before, wanted = [np.asarray(v) for v in net.trainable_variables], reference_gradients(net)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), backward_passes_per_step=passes, average_aggregated_gradients=average
        )
        assert type(optimizer).__name__ == "SGD"

        @tf.function
        def step(net=net, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = squares(net, RANK)
            optimizer.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True))

        for done in range(passes):
            close(net.trainable_variables, before)
            step()
            assert int(optimizer.iterations.numpy()) == done + 1
        factor = 0.1 * (passes if not average else 1)
        close(net.trainable_variables, [b - factor * g for b, g in zip(before, wanted, strict=True)])
    # through Keras's own training loop, and saved without a trace of this package
    net = model()
    hvd.broadcast_variables(net.variables, root_rank=0)
    net.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), loss="mse", jit_compile=False)
    history = net.fit(*data(RANK), epochs=30, batch_size=4, verbose=0, shuffle=False).history["loss"]
    assert history[-1] < history[0] / 2
    states = hvd.allgather_object([np.asarray(v) for v in [*net.variables, *net.optimizer.variables]])
    close(states[0], states[-1])
    path = f"{os.environ['TEST_FOLDER']}/{RANK}.keras"
    net.save(path)
    assert type(keras.models.load_model(path).optimizer) is keras.optimizers.Adam
    # one that has a state keeps it
    trained = keras.optimizers.Adam(0.05)
    trained.build(net.trainable_variables)
    trained.iterations.assign(7)
    assert int(hvd.DistributedOptimizer(trained).iterations.numpy()) == 7
    # a layer whose gradients stay this rank's own
    net = model()
    hvd.broadcast_variables(net.variables, root_rank=0)
    before = [np.asarray(v) for v in net.trainable_variables]
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[net.layers[0]], scale_local_gradients=False)
    with tf.GradientTape() as tape:
        loss = squares(net, RANK)
    mine = tape.gradient(loss, net.trainable_variables)
    optimizer.apply_gradients(zip(mine, net.trainable_variables, strict=True))
    close(net.trainable_variables[:2], [b - 0.1 * np.asarray(g) for b, g in zip(before[:2], mine[:2], strict=True)])
    facts["unknown optimizer"] = refused(lambda: hvd.DistributedOptimizer(object()), ValueError)


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1 * 0.5 ** tf.cast(step, tf.float32)


def own_schedules_and_patterns():
    # a schedule of the program's own, which has no configuration
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(Halving()), name="own")
    variable = keras.Variable(1.0)
    for _ in range(2):
        wrapped.apply([tf.constant(RANK + 1.0)], [variable])
    close([variable], [1 - (0.1 + 0.05) * (SIZE + 1) / 2])
    assert wrapped.name == "own"
    # several passes have sums of the first one's gradients
    several = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    pair = [keras.Variable(1.0, name="first"), keras.Variable(1.0, name="second")]
    several.apply([tf.constant(1.0), None], pair)
    text = refused(lambda: several.apply([tf.constant(1.0), tf.constant(1.0)], pair), ValueError)
    assert "'second' has a gradient, and had none" in text, text
    assert "'first' has no gradient" in refused(lambda: several.apply([None, None], pair), ValueError)


def sessions():
    v1 = tf.compat.v1
    for passes in (1, 2):
        with tf.Graph().as_default():
            x, y = v1.placeholder(tf.float32, [None, 4]), v1.placeholder(tf.float32, [None, 1])
            weights = v1.get_variable("weights", initializer=tf.fill([4, 1], float(RANK + 1)))
            steps = v1.train.get_or_create_global_step()
            loss = tf.reduce_mean(tf.square(x @ weights - y))
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.05), backward_passes_per_step=passes)
            train = optimizer.minimize(loss, global_step=steps)
            metric = hvd.allreduce(loss)
            feed = dict(zip((x, y), data(RANK), strict=True))
            with v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as session:
                expected = session.run(weights)
                assert np.array_equal(expected, np.ones((4, 1)))
                for _ in range(4):
                    session.run(train, feed)
                for _ in range(4 // passes):
                    slopes = [2 * inputs.T @ (inputs @ expected - wanted) / len(inputs) for inputs, wanted in map(data, range(SIZE))]
                    expected = expected - 0.05 * passes * sum(slopes) / SIZE
                close([session.run(weights)], [expected])
                assert session.run(steps) == 4
                alone = hvd.allgather_object(session.run(loss, feed))
                close([session.run(metric, feed)], [sum(alone) / SIZE])
    facts["eager"] = refused(lambda: hvd.broadcast_global_variables(0), RuntimeError)
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("v", initializer=float(RANK))
        session.run(v1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(SIZE - 1))
        assert session.run(variable) == SIZE - 1
        state = hvd.elastic.TensorFlowState(session=session, epoch=RANK)
        variable.load(5.0 + RANK, session)
        state.restore()
        assert session.run(variable) == SIZE - 1
        variable.load(5.0 + RANK, session)
        state.sync()
        assert [session.run(variable), state.epoch] == [5.0, 0]


def one_after_the_other():
    """Gradients that are ready in another order on each rank, in a session of one thread: an optimizer's callbacks keep their order."""
    v1 = tf.compat.v1
    for groups in (None, 2):
        with tf.Graph().as_default():
            late = tf.constant([2.0])
            for _ in range(200):
                late = tf.numpy_function(lambda x: x, [late], tf.float32)
            late.set_shape([1])
            parts = [tf.constant([2.0]), late] if RANK % 2 else [late, tf.constant([2.0])]
            slices = [tf.IndexedSlices(part[:, None], tf.constant([0]), [1, 1]) for part in parts]
            variables = [v1.get_variable(name, initializer=tf.zeros([1, 1] if groups is None else [1])) for name in ("a", "b")]
            optimizer = v1.train.GradientDescentOptimizer(1.0)
            pairs = list(zip(parts if groups else slices, variables, strict=True))
            optimizer.compute_gradients = lambda pairs=pairs: pairs
            wrapped = hvd.DistributedOptimizer(optimizer, groups=groups)
            train = wrapped.apply_gradients(wrapped.compute_gradients())
            config = v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
            with v1.Session(config=config) as session:
                session.run(v1.global_variables_initializer())
                session.run(train)
                assert [float(each.item()) for each in session.run(variables)] == [-2.0, -2.0]


def batch_normalisation():
    rows = [np.random.default_rng(rank).standard_normal((3 + rank, 2, 2, 4)).astype("float32") * 3 + 100 for rank in range(SIZE)]
    layer, plain = hvd.SyncBatchNormalization(), keras.layers.BatchNormalization()
    weights = [np.random.default_rng(9 + rank).standard_normal(each.shape).astype("float32") for rank, each in enumerate(rows)]

    def run(layer, x, w):
        x = tf.convert_to_tensor(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = layer(x, training=True)
            loss = tf.reduce_sum(result * w)
        return result, tape.gradient(loss, x)

    whole, slopes = run(plain, np.concatenate(rows), np.concatenate(weights))
    begin = sum(len(each) for each in rows[:RANK])
    for function in (run, tf.function(run)):
        layer = hvd.SyncBatchNormalization()
        if function is not run:
            layer.build(rows[RANK].shape)
        got, slope = function(layer, rows[RANK], weights[RANK])
        np.testing.assert_allclose(got, whole[begin : begin + len(rows[RANK])], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(slope, slopes[begin : begin + len(rows[RANK])], rtol=1e-2, atol=1e-3)
        np.testing.assert_allclose(layer.moving_mean, plain.moving_mean, rtol=1e-4)
    refused(lambda: hvd.SyncBatchNormalization(fused=True), ValueError)
    assert np.allclose(layer(rows[RANK]), layer(rows[RANK], training=False))


def states():
    net = model()
    refused(lambda: hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)])), ValueError)
    state = hvd.elastic.TensorFlowKerasState(net, keras.optimizers.Adam(), epoch=RANK)
    kept = [np.asarray(v) for v in net.variables]
    net.variables[0].assign(net.variables[0] + 1)
    state.restore()
    close(net.variables, kept)

    @hvd.elastic.run
    def train(state):
        states = hvd.allgather_object([np.asarray(v) for v in [*state.model.variables, *state.optimizer.variables]])
        close(states[0], states[-1])
        state.epoch += 1
        state.commit()
        return state.epoch

    assert train(state) == 1
    values = hvd.elastic.TensorFlowState([tf.Variable([float(RANK)])], batch=RANK)
    values.sync()
    assert values.batch == 0


for part in (tapes, keras_optimizers, own_schedules_and_patterns, sessions, one_after_the_other, batch_normalisation, states):
    if part.__name__ in sys.argv[1:] or not sys.argv[1:]:
        part()
report(**facts)
hvd.shutdown()
