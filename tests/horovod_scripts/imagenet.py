"""Horovod's example of ImageNet in Keras (2018-2022): resumes, warms up, steps the rate down."""

import argparse
import os

import keras
import numpy as np
import tensorflow as tf
from keras import backend as K
from keras.preprocessing.image import ImageDataGenerator

import horovod.keras as hvd

parser = argparse.ArgumentParser(description='Keras ImageNet Example',
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument('--log-dir', default='./imagenet-logs', help='tensorboard log directory')
parser.add_argument('--checkpoint-format', default='./imagenet-{epoch}.h5',
                    help='checkpoint file format')
parser.add_argument('--fp16-allreduce', action='store_true', default=False,
                    help='use fp16 compression during allreduce')
parser.add_argument('--batch-size', type=int, default=10, help='input batch size for training')
parser.add_argument('--epochs', type=int, default=90, help='number of epochs to train')
parser.add_argument('--base-lr', type=float, default=0.0125, help='learning rate for a single GPU')
parser.add_argument('--warmup-epochs', type=float, default=5, help='number of warmup epochs')
parser.add_argument('--milestones', type=int, nargs=3, default=[30, 60, 80])
parser.add_argument('--momentum', type=float, default=0.9, help='SGD momentum')
parser.add_argument('--wd', type=float, default=0.00005, help='weight decay')
parser.add_argument('--norm', default='batch', help='batch or group')
args = parser.parse_args()

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process)
config = tf.compat.v1.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
tf.compat.v1.keras.backend.set_session(tf.compat.v1.Session(config=config))

# If set > 0, will resume training from a given checkpoint.
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break

# Horovod: broadcast resume_from_epoch from rank 0 (which will have
# checkpoints) to other ranks.
resume_from_epoch = hvd.broadcast(resume_from_epoch, 0, name='resume_from_epoch')

# Horovod: print logs on the first worker.
verbose = 1 if hvd.rank() == 0 else 0

with np.load('photos.npz') as photos:
    x, y = photos['images'], keras.utils.to_categorical(photos['labels'], 2)
train_gen = ImageDataGenerator(preprocessing_function=lambda image: image / 127.5 - 1)
train_iter = train_gen.flow(x[hvd.rank()::hvd.size()], y[hvd.rank()::hvd.size()],
                            batch_size=args.batch_size, shuffle=False)
test_iter = train_gen.flow(x[hvd.rank()::hvd.size()], y[hvd.rank()::hvd.size()],
                           batch_size=args.batch_size, shuffle=False)


def normalized(inputs):
    if args.norm == 'batch':
        return keras.layers.BatchNormalization(axis=3, fused=True)(inputs)
    return keras.layers.GroupNormalization(4)(inputs)


def residual(inputs, width, strides):
    outputs = keras.layers.Conv2D(width, 3, strides=strides, padding='same', use_bias=False,
                                  kernel_initializer='he_normal')(inputs)
    outputs = keras.layers.Activation('relu')(normalized(outputs))
    outputs = normalized(keras.layers.Conv2D(width, 3, padding='same', use_bias=False)(outputs))
    if strides != 1:
        inputs = keras.layers.Conv2D(width, 1, strides=strides, use_bias=False)(inputs)
    return keras.layers.Activation('relu')(keras.layers.add([outputs, inputs]))


def resnet():
    inputs = keras.layers.Input((24, 24, 3))
    outputs = normalized(keras.layers.Conv2D(8, 3, strides=2, padding='same')(inputs))
    for width, strides in ((8, 1), (16, 2)):
        outputs = residual(outputs, width, strides)
    outputs = keras.layers.GlobalAveragePooling2D()(outputs)
    return keras.models.Model(inputs, keras.layers.Dense(2, activation='softmax')(outputs))


# Horovod: (optional) compression algorithm.
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
initial_lr = args.base_lr * hvd.size()
tf.keras.utils.set_random_seed(3 + hvd.rank())

# Restore from a previous checkpoint, if initial_epoch is specified.
# Horovod: restore on the first worker which will broadcast both model and optimizer weights
# to other workers.
if resume_from_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(args.checkpoint_format.format(epoch=resume_from_epoch),
                           compression=compression)
else:
    # A model that is included with Keras is optimized for inference.
    # Add L2 weight decay & adjust BN settings.
    model = resnet()
    model_config = model.get_config()
    for layer, layer_config in zip(model.layers, model_config['layers']):
        if hasattr(layer, 'kernel_regularizer'):
            regularizer = keras.regularizers.l2(args.wd)
            layer_config['config']['kernel_regularizer'] = \
                {'class_name': regularizer.__class__.__name__,
                 'config': regularizer.get_config()}
        if type(layer) is keras.layers.BatchNormalization:
            layer_config['config']['momentum'] = 0.9
            layer_config['config']['epsilon'] = 1e-5
    model = keras.models.Model.from_config(model_config)

    # Horovod: adjust learning rate based on number of GPUs.
    opt = keras.optimizers.SGD(lr=initial_lr, momentum=args.momentum)

    # Horovod: add Horovod Distributed Optimizer.
    opt = hvd.DistributedOptimizer(opt, compression=compression)
    model.compile(loss=keras.losses.categorical_crossentropy,
                  optimizer=opt,
                  metrics=['accuracy', 'top_k_categorical_accuracy'])

callbacks = [
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    # This is necessary to ensure consistent initialization of all workers when
    # training is started with random weights or restored from a checkpoint.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),

    # Horovod: average metrics among workers at the end of every epoch.
    hvd.callbacks.MetricAverageCallback(),

    # Horovod: raise the learning rate during the first epochs.
    hvd.callbacks.LearningRateWarmupCallback(
        initial_lr=initial_lr, warmup_epochs=args.warmup_epochs, verbose=verbose),

    # Horovod: after the warmup reduce learning rate by 10 on the 30th, 60th and 80th epochs.
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=initial_lr, multiplier=1., start_epoch=args.warmup_epochs,
        end_epoch=args.milestones[0]),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=initial_lr, multiplier=1e-1, start_epoch=args.milestones[0],
        end_epoch=args.milestones[1]),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=initial_lr, multiplier=1e-2, start_epoch=args.milestones[1],
        end_epoch=args.milestones[2]),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=initial_lr, multiplier=1e-3, start_epoch=args.milestones[2]),
]

# Horovod: save checkpoints only on the first worker to prevent other workers from corrupting them.
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_format))
    callbacks.append(keras.callbacks.TensorBoard(args.log_dir))

# Train the model. The training will randomly sample 1 / N batches of training data and
# 3 / N batches of validation data on every worker, where N is the number of workers.
history = model.fit_generator(train_iter,
                              steps_per_epoch=len(train_iter),
                              callbacks=callbacks,
                              epochs=args.epochs,
                              verbose=verbose,
                              shuffle=False,
                              workers=2,
                              initial_epoch=resume_from_epoch,
                              validation_data=test_iter,
                              validation_steps=3 * len(test_iter))

# Evaluate the model on the full data set.
evaluation = hvd.allreduce(model.evaluate_generator(test_iter, len(test_iter), workers=2))
figures = {'rate': K.get_value(model.optimizer.lr)}
if verbose:
    print('Test loss:', evaluation[0])
    print('Test accuracy:', evaluation[1])
