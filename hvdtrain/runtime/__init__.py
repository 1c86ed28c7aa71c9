"""The rank side that needs no TensorFlow: meeting the other ranks, failing well, stopping well."""
