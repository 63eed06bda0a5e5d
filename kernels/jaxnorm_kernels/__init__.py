"""Device code of jaxnorm: one subpackage per implementation of the contract in ``specs``."""
