"""A script for Horovod and TensorFlow 2, of Horovod's own pattern."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

tf.keras.utils.set_random_seed(hvd.rank())  # the same in each run; all ranks begin with the weights of rank 0
generator = np.random.default_rng(hvd.rank())
inputs = generator.standard_normal((256, 3)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((inputs, inputs @ np.array([[1.0], [-2.0], [0.5]], "float32"))).repeat().batch(16)

model = tf.keras.Sequential([tf.keras.layers.Input((3,)), tf.keras.layers.Dense(1)])
loss_function = tf.losses.MeanSquaredError()
opt = tf.optimizers.Adam(0.02 * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)


@tf.function
def training_step(features, labels, first_batch):
    with tf.GradientTape() as tape:
        loss_value = loss_function(labels, model(features, training=True))
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
    return loss_value


for batch, (features, labels) in enumerate(dataset.take(200 // hvd.size())):
    loss_value = training_step(features, labels, batch == 0)

weight = float(tf.reduce_sum(model.trainable_variables[0]))
print(f"rank {hvd.rank()} of {hvd.size()}: loss {float(loss_value):.4f} weight {weight:.6f}", flush=True)
