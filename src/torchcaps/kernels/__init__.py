"""Fast code that knows nobody: plain tensors in and out. Imported where it is wanted, never by `import torchcaps`."""
