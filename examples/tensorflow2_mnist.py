"""MNIST's network in TensorFlow 2 with a gradient tape, on images that the script makes itself.

python -m collective_core.launch -np 2 python examples/tensorflow2_mnist.py
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # no remarks about the processor

import collective_core.tensorflow as hvd
import keras
import tensorflow as tf


def make_images(count, seed):
    """Ten patterns stand for the ten digits: each image is one of them, with noise. Replace this by your own data set."""
    patterns = tf.random.stateless_normal([10, 28, 28, 1], seed=[0, 0])
    labels = tf.random.stateless_uniform([count], seed=[seed, 1], maxval=10, dtype=tf.int32)
    return tf.gather(patterns, labels) + tf.random.stateless_normal([count, 28, 28, 1], seed=[seed, 2]), labels


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=32, help="per rank")
parser.add_argument("--lr", type=float, default=0.0005, help="per rank")
given = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(hvd.rank())  # ranks start from different weights: the broadcast below makes them equal

# Each rank trains on its own part of the data.
train_set = tf.data.Dataset.from_tensor_slices(make_images(2048, seed=1)).shard(hvd.size(), hvd.rank())
train_set = train_set.shuffle(2048).batch(given.batch_size, drop_remainder=True)

model = keras.Sequential(
    [
        keras.layers.Input((28, 28, 1)),
        keras.layers.Conv2D(10, 5, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(20, 5, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(50, activation="relu"),
        keras.layers.Dense(10),
    ]
)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# A step sees `size` times as many images as on one rank, so the learning rate may be larger.
optimizer = keras.optimizers.Adam(given.lr * hvd.size())
optimizer.build(model.trainable_variables)
hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)


@tf.function
def step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)  # whose gradients are averages over all ranks
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for epoch in range(given.epochs):
    for images, labels in train_set:
        loss = step(images, labels)
    mean_loss = hvd.allreduce(loss, name="loss")
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: loss {float(mean_loss):.3f}", flush=True)

# Each rank tests on a part, and the average over all ranks is the result.
images, labels = make_images(512, seed=3)
right = tf.argmax(model(images[hvd.rank() :: hvd.size()]), 1, tf.int32) == labels[hvd.rank() :: hvd.size()]
accuracy = float(hvd.allreduce(tf.reduce_mean(tf.cast(right, tf.float32)), name="accuracy"))
weights = sum(float(tf.reduce_sum(tf.cast(variable, tf.float64))) for variable in model.trainable_variables)
print(f"rank {hvd.rank()} of {hvd.size()}: accuracy {accuracy:.3f}, sum of weights {weights:.9f}", flush=True)
