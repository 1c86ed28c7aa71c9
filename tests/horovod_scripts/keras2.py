"""A plain script of 2019, for Keras 2 and one GPU. Keras 3 alone does not run it."""

import argparse
import os

import numpy as np
from keras import backend as K
from keras.callbacks import Callback, ModelCheckpoint, ReduceLROnPlateau
from keras.engine.topology import Layer
from keras.layers.convolutional import Conv2D
from keras.layers.core import Activation, Dense, Flatten
from keras.models import Sequential, load_model
from keras.optimizers import SGD
from keras.utils import Sequence, multi_gpu_model, set_random_seed
from keras.utils.np_utils import to_categorical

parser = argparse.ArgumentParser()
parser.add_argument('--batch-size', type=int, default=25)
args = parser.parse_args()

set_random_seed(19)
with np.load('digits.npz') as digits:
    x, y = digits['images'], to_categorical(digits['labels'], 10)


class Digits(Sequence):
    def __init__(self, x, y, batch_size):
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self):
        return int(np.ceil(len(self.x) / float(self.batch_size)))

    def __getitem__(self, idx):
        rows = slice(idx * self.batch_size, (idx + 1) * self.batch_size)
        return self.x[rows], self.y[rows]


class Scale(Layer):
    """A factor for each channel."""

    def build(self, input_shape):
        self.factor = self.add_weight('factor', (input_shape[-1],), initializer='ones')
        super().build(input_shape)

    def call(self, x):
        return x * self.factor


class Halve(Callback):
    def __init__(self, every):
        super().__init__()
        self.every, self.rates = every, []

    def on_epoch_begin(self, epoch, logs=None):
        if epoch and epoch % self.every == 0:
            K.set_value(self.model.optimizer.lr, K.get_value(self.model.optimizer.lr) / 2.)
        self.rates.append(float(K.get_value(self.model.optimizer.lr)))


def make_model():
    model = Sequential()
    model.add(Conv2D(8, (3, 3), input_shape=(8, 8, 1)))
    model.add(Scale())
    model.add(Activation('relu'))
    model.add(Flatten())
    model.add(Dense(10, activation='softmax'))
    model = multi_gpu_model(model, gpus=2)
    sgd = SGD(lr=0.05, decay=1e-2, momentum=0.9, nesterov=True)
    model.compile(loss='categorical_crossentropy', optimizer=sgd, metrics=['acc'])
    return model


train, held_out = Digits(x[:240], y[:240], args.batch_size), Digits(x[240:], y[240:], 30)
model = make_model()
halve = Halve(every=2)
history = model.fit_generator(
    train, steps_per_epoch=240 / 40., epochs=4, verbose=1, validation_data=held_out,
    shuffle=False, max_queue_size=4, workers=2, use_multiprocessing=False,
    callbacks=[halve, ReduceLROnPlateau(monitor='val_acc', patience=1, epsilon=0.5, min_lr=1e-4),
               ModelCheckpoint('keras2-{epoch:02d}.hdf5', monitor='val_acc', mode='auto',
                               save_weights_only=True, period=2)])
scores = model.evaluate_generator(held_out, steps=len(held_out), workers=2)
print('%s: %.2f%%' % (model.metrics_names[1], scores[1] * 100))
evaluation = dict(zip(model.metrics_names, scores))

model.save_weights('keras2.h5')
again = make_model()
again.load_weights('keras2.h5')
second = make_model()
second.load_weights('keras2-02.hdf5')

model.save('keras2-model.h5')
model = load_model('keras2-model.h5', custom_objects={'Scale': Scale})
model.fit(x[:240], y[:240], batch_size=args.batch_size, epochs=6, initial_epoch=4, verbose=0,
          shuffle=False)
figures = {'rates': halve.rates, 'rate': float(K.get_value(model.optimizer.lr)),
           'found': os.path.exists('keras2-03.hdf5')}
classes = again.predict_classes(x[240:])
