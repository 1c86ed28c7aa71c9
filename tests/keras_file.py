"""Reads a `.keras` file without Keras."""

import zipfile

import h5py


def weights_of(file):
    """The arrays of a Keras file by name, the optimizer's among them."""
    found = {}
    with zipfile.ZipFile(file) as archive, archive.open("model.weights.h5") as stream, \
            h5py.File(stream) as weights:
        weights.visititems(lambda name, item: found.update({name: item[()]})
                           if isinstance(item, h5py.Dataset) else None)
    return found
