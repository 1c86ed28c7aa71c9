"""Horovod's advanced example of Keras (2018): warm-up, schedules, augmentation, generators."""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import backend as K
from keras.layers import Conv2D, Dense, Flatten, MaxPooling2D
from keras.models import Sequential
from keras.preprocessing.image import ImageDataGenerator
from keras.utils.np_utils import to_categorical

import horovod.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument('--batch-size', type=int, default=8)
parser.add_argument('--base-lr', type=float, default=0.01)
parser.add_argument('--rotation', type=float, default=8)
args = parser.parse_args()

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process)
config = tf.compat.v1.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
K.set_session(tf.compat.v1.Session(config=config))

num_classes, epochs = 10, 8
tf.keras.utils.set_random_seed(7 + hvd.rank())

with np.load('digits.npz') as digits:
    x_train, x_test = digits['images'][:240], digits['images'][240:]
    y_train, y_test = digits['labels'][:240], digits['labels'][240:]
y_train, y_test = to_categorical(y_train, num_classes), to_categorical(y_test, num_classes)
x_train, y_train = x_train[hvd.rank()::hvd.size()], y_train[hvd.rank()::hvd.size()]
x_test, y_test = x_test[hvd.rank()::hvd.size()], y_test[hvd.rank()::hvd.size()]

model = Sequential()
model.add(Conv2D(8, kernel_size=(3, 3), activation='relu', input_shape=(8, 8, 1)))
model.add(Conv2D(16, (3, 3), activation='relu'))
model.add(MaxPooling2D(pool_size=(2, 2)))
model.add(Flatten())
model.add(Dense(32, activation='relu'))
model.add(Dense(num_classes, activation='softmax'))

# Horovod: adjust learning rate based on number of GPUs.
scaled_lr = args.base_lr * hvd.size()
opt = keras.optimizers.SGD(lr=scaled_lr, momentum=0.9, decay=1e-3)

# Horovod: add Horovod Distributed Optimizer.
opt = hvd.DistributedOptimizer(opt)

model.compile(loss=keras.losses.categorical_crossentropy, optimizer=opt, metrics=['acc'])


class Cut(keras.callbacks.Callback):
    """Another cut of the learning rate after one epoch, and a note of each epoch's."""

    def __init__(self, after):
        super().__init__()
        self.after, self.rates = after, []

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(float(K.get_value(self.model.optimizer.lr)))
        if epoch == self.after:
            K.set_value(self.model.optimizer.lr, 0.5 * K.get_value(self.model.optimizer.lr))


cut = Cut(after=5)
callbacks = [
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),

    # Horovod: average metrics among workers at the end of every epoch.
    # It must be in the list before the ReduceLROnPlateau.
    hvd.callbacks.MetricAverageCallback(),

    # Horovod: the learning rate is raised during the first epochs.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=scaled_lr, start_epoch=3, end_epoch=5, multiplier=0.8),

    # Reduce the learning rate if training plateaus.
    keras.callbacks.ReduceLROnPlateau(monitor='val_loss', patience=1, min_delta=0.2, verbose=1),
    cut,
]

# Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting them.
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(
        './advanced-{epoch}.h5', monitor='val_acc', save_best_only=True, mode='auto', period=2,
        save_weights_only=True))

train_gen = ImageDataGenerator(rotation_range=args.rotation)
test_gen = ImageDataGenerator()
train_iter = train_gen.flow(x_train, y_train, batch_size=args.batch_size, shuffle=False)
test_iter = test_gen.flow(x_test, y_test, batch_size=args.batch_size, shuffle=False)

# Train the model.
history = model.fit_generator(train_iter,
                              steps_per_epoch=len(x_train) / args.batch_size,
                              callbacks=callbacks,
                              epochs=epochs,
                              verbose=1 if hvd.rank() == 0 else 0,
                              shuffle=False,
                              workers=2,
                              initial_epoch=0,
                              validation_data=test_iter,
                              validation_steps=len(test_iter))

# Evaluate the model on the rank's part of the data, and average over ranks.
evaluation = hvd.allreduce(model.evaluate_generator(test_iter, len(test_iter), workers=2))
figures = dict(zip(model.metrics_names, evaluation), rates=cut.rates)
if hvd.rank() == 0:
    print('Test accuracy:', figures['acc'])
    print('Classes:', model.predict_classes(x_test[:5]))
