"""The kernels of jaxnorm, in three implementations: ``xla``, ``mosaic`` and ``triton``."""
