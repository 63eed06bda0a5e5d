"""Code that the Flax and equinox modules share: conversion of existing models, and attention."""
