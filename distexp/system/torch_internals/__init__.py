"""All uses of private PyTorch APIs, by concern: a new PyTorch release breaks only this package."""
