"""Training with Keras on the backend that KERAS_BACKEND names: model.fit, saved models, callbacks, elastic states."""

import functools
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
import collective_core.keras as hvd
import common
import keras
import numpy as np

hvd.init()
rank, size = hvd.rank(), hvd.size()
backend = keras.backend.backend()
folder = Path(sys.argv[1])
ROWS = 12
generator = np.random.default_rng(5)
points = generator.normal(size=(4, size * ROWS, 6)).astype(np.float32)  # batches of all ranks together
wanted = np.tanh(points @ generator.normal(size=(6, 3))).astype(np.float32)
mine = slice(rank * ROWS, (rank + 1) * ROWS)
found = {}


def make(seed=0, optimizer=None, **options):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)])
    model.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(), metrics=[keras.metrics.MeanAbsoluteError()], **options)
    return model


def fit(model, part, epochs=2, callbacks=(), **options):
    """In batches of this rank's part, in this order."""
    x, y = (np.concatenate(list(values[:, part])) for values in (points, wanted))
    rows = len(x) // len(points)
    return model.fit(x, y, batch_size=rows, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), **options)


def weights(model):
    return [np.asarray(value) for value in model.get_weights()]


def same(one, other, tolerance=1e-5):
    return len(one) == len(other) and all(np.allclose(a, b, rtol=1e-4, atol=tolerance) for a, b in zip(one, other, strict=True))


def everywhere(model):
    everyone = hvd.allgather_object([value.tobytes() for value in weights(model)])
    return all(other == everyone[0] for other in everyone)


def sgd(**options):
    return keras.optimizers.SGD(0.2, momentum=0.9, **options)


@functools.cache
def of_whole(make_optimizer=sgd, **options):
    """What one process with all the data gets."""
    model = make(1, make_optimizer(**options))
    fit(model, slice(None))
    return weights(model)


# Different beginnings; the broadcast makes them rank 1's. The same as one process with the whole batch.
for name, options in {"sgd": {}, "clipped": {"global_clipnorm": 0.05}}.items():
    model = make(rank, hvd.DistributedOptimizer(sgd(**options)))
    history = fit(model, mine, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1), hvd.callbacks.MetricAverageCallback()])
    found[name] = same(weights(model), of_whole(**options))
    found[f"{name} everywhere"] = everywhere(model)
    losses = hvd.allgather_object(history.history["loss"])
    found[f"{name} losses"] = losses == [losses[0]] * size and losses[0][1] < losses[0][0]
alone = make(1, sgd())
fit(alone, mine)
found["alone differs"] = not same(weights(alone), of_whole())
adam = make(1, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
fit(adam, mine)
found["adam"] = same(weights(adam), of_whole(keras.optimizers.Adam, learning_rate=0.01), 2e-4)
found["compiled"] = adam.run_eagerly is False

# A model that only rank 0 has built: then the broadcast comes after the first step, on all ranks.
keras.utils.set_random_seed(rank)
late = keras.Sequential([keras.layers.Dense(3)])
if rank == 0:
    late.build((None, 6))
late.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
fit(late, mine, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
found["built on one rank"] = everywhere(late)

# Options.
for name, options, learning_rate in (
    ("predivided", {"gradient_predivide_factor": 2.0}, 0.2),
    ("summed", {"op": hvd.Sum}, 0.2 / size),
    ("compressed", {"compression": hvd.Compression.bf16}, 0.2),
):
    model = make(1, hvd.DistributedOptimizer(keras.optimizers.SGD(learning_rate, momentum=0.9), **options))
    fit(model, mine)
    found[name] = same(weights(model), of_whole(), 0.1 if name == "compressed" else 1e-5)
two = make(1, hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2, average_aggregated_gradients=True))
fit(two, mine)
found["two passes"] = same(weights(two), of_whole(gradient_accumulation_steps=2)) and everywhere(two)
two = make(1, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=2))
fit(two, mine)
found["two passes added"] = same(weights(two), of_whole(gradient_accumulation_steps=2))
only = hvd.add_process_set([0])
outside = make(1, hvd.DistributedOptimizer(sgd(), process_set=only))
fit(outside, mine)
found["outside of the set"] = same(weights(outside), weights(alone))
try:
    hvd.DistributedOptimizer("sgd")
except ValueError as error:
    found["no optimizer"] = "takes an optimizer of Keras 3, not str" in str(error)
for name, options in {"op": {"op": hvd.Max}, "factor": {"op": hvd.Sum, "gradient_predivide_factor": 2.0}}.items():
    try:
        hvd.DistributedOptimizer(sgd(), **options)
    except ValueError:
        found[name] = True
wrapped = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5))
config = wrapped.get_config()
layered = make(1)
if backend == "tensorflow":
    layered.compile(optimizer=hvd.PartialDistributedOptimizer(sgd(), local_layers=layered.layers[0]), loss="mse")
    fit(layered, mine)
    first, second = (hvd.allgather_object([value.tobytes() for value in layer.get_weights()]) for layer in layered.layers)
    found["local layer"] = first[0] != first[1] and second[0] == second[1]
    found["no CUDA"] = hvd.cuda_built() is False
else:
    try:
        hvd.PartialDistributedOptimizer(sgd(), local_layers=layered.layers[0])
    except ValueError as error:
        found["local layer"] = "needs KERAS_BACKEND=tensorflow" in str(error)
found["no NCCL"] = hvd.nccl_built() in (0, False) or backend == "torch"
found["config"] = (
    config == type(wrapped).from_config(config).get_config() and config.keys() == keras.optimizers.Adam(0.5).get_config().keys()
)


# Saved models load with Keras alone, and with the optimizer wrapped again; training goes on where it was.
class Slower(keras.optimizers.SGD):
    pass


for name, optimizer, own in (("saved", sgd(), None), ("saved own", Slower(0.2, momentum=0.9), [Slower])):
    model = make(1, hvd.DistributedOptimizer(optimizer))
    fit(model, mine)
    path = str(folder / f"{rank} {name}.keras")
    model.save(path)
    fit(model, mine)
    plain = keras.models.load_model(path, custom_objects={"Slower": Slower} if own else None)
    found[f"{name}, plain"] = isinstance(plain.optimizer, type(optimizer)) and type(plain.optimizer).__name__ == type(optimizer).__name__
    again = hvd.load_model(path, custom_optimizers=own)
    fit(again, mine)
    found[f"{name}, again"] = same(weights(again), weights(model)) and everywhere(again)
    fit(plain, mine)
    found[f"{name}, plain is alone"] = not same(weights(plain), weights(model))
model.save(str(folder / f"{rank}.h5"))
found["h5"] = same(weights(hvd.load_model(str(folder / f"{rank}.h5"), custom_optimizers=[Slower])), weights(model))

# One rank's infinity is everyone's: all ranks leave the step out.
scaled = make(1, hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)))
before = weights(scaled)
x, y = points[0, mine].copy(), wanted[0, mine]
x[0, 0] = np.inf if rank == 1 else x[0, 0]
scaled.fit(x, y, batch_size=ROWS, verbose=0)
found["infinity"] = same(weights(scaled), before) and float(np.asarray(scaled.optimizer.dynamic_scale)) == 4.0
scaled.fit(points[0, mine], y, batch_size=ROWS, verbose=0)
found["after the infinity"] = not same(weights(scaled), before) and everywhere(scaled)
inside = make(1, keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd())))
try:
    fit(inside, mine, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
except ValueError as error:
    found["scaled outside"] = "pass hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer" in str(error)

# Learning rates and metrics.
seen = []


class Watch(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):  # noqa: ARG002
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        seen.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


class Validated(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):  # noqa: ARG002
        if rank == 0:
            logs["val_of_one"] = 3.0


schedule = [
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(0.4, multiplier=0.5, start_epoch=2, end_epoch=4),
    hvd.callbacks.LearningRateScheduleCallback(0.4, multiplier=lambda epoch: epoch / 100, start_epoch=4),
]
model = make(1, hvd.DistributedOptimizer(keras.optimizers.SGD(0.4)))
history = fit(model, mine, 6, [*schedule, Validated(), hvd.callbacks.MetricAverageCallback(), Watch()]).history
steps = np.arange(8)
warm = 0.4 / size * ((steps / 4 + 0.25) * (size - 1) / 2 + 1)
found["learning rates"] = bool(np.allclose(seen, [*warm, *[0.1] * 4, *[0.05] * 4, *[0.016] * 4, *[0.02] * 4], rtol=1e-5))
found["lr in the history"] = bool(np.allclose(history["lr"][-1], 0.02))
found["metric of one"] = history["val_of_one"] == [3.0] * 6
best = folder / "best.keras"
callbacks = [hvd.callbacks.MetricAverageCallback(), hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=str(best))]
fit(make(1, hvd.DistributedOptimizer(sgd())), mine, callbacks=callbacks)
hvd.barrier()
found["best"] = best.exists()

# Functions of tensors, variables and objects.
number = np.arange(3, dtype=np.float32) + rank
as_numpy = keras.ops.convert_to_numpy
found["allreduce"] = np.allclose(as_numpy(hvd.allreduce(number)), np.arange(3) + (size - 1) / 2)
found["sum"] = np.allclose(as_numpy(hvd.allreduce(number, average=False)), size * np.arange(3) + sum(range(size)))
found["allgather"] = np.allclose(as_numpy(hvd.allgather(number[: rank + 1])), np.concatenate([np.arange(r + 1) + r for r in range(size)]))
found["broadcast"] = np.allclose(as_numpy(hvd.broadcast(number, root_rank=1)), np.arange(3) + 1)
found["reducescatter"] = np.allclose(as_numpy(hvd.reducescatter(np.ones((size, 2), np.float32), op=hvd.Sum)), size)
try:
    hvd.broadcast_variables(model.weights[: 1 + rank])
except hvd.CollectiveError as error:
    found["variables differ"] = "the variables of rank" in str(error)
try:
    hvd.broadcast_global_variables(0)
except RuntimeError as error:
    found["global variables"] = "Keras 3 has no global variables" in str(error)

# Elastic states, where nothing changes, also in the middle of an epoch.
model = make(rank, hvd.DistributedOptimizer(sgd()))
state = hvd.elastic.KerasState(model, batch=20 + rank, epoch=10 + rank)
state.sync()
found["synced"] = (state.batch, state.epoch) == (20, 10) and everywhere(model)
kept = weights(model)
model.set_weights([value + 1 for value in kept])
state.batch = 21
state.restore()
found["restored"] = state.batch == 20 and same(weights(model), kept)
model.set_weights([value + 2 for value in kept])
state.commit()
model.set_weights(kept)
state.restore()
found["committed"] = same(weights(model), [value + 2 for value in kept])


class Fail(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002
        if batch == 2:
            raise KeyError("of the program")


@hvd.elastic.run
def train(state):
    state.epoch = 0
    commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=2)
    track = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)]
    fit(model, mine, 2, [*track, commit])
    after_two = state.epoch
    try:
        fit(model, mine, 1, [*track, commit, Fail()])
    except KeyError:
        state.restore()
    return after_two, state.epoch, state.batch


found["trained"] = train(state) == (2, 2, 1) and everywhere(model)

# A mistake is an error on every rank.
try:
    wrong = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3 + rank)])
    wrong.compile(optimizer=hvd.DistributedOptimizer(sgd()), loss="mse")
    wrong.fit(points[0, mine], np.zeros((ROWS, 3 + rank), np.float32), verbose=0)
except Exception as error:  # noqa: BLE001 - each backend raises its own
    found["wrong shapes"] = "ask for different things" in str(error)
common.report(found={name: bool(value) for name, value in found.items()}, backend=backend)
hvd.shutdown()
