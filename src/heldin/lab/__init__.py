"""The laboratory: experiments on heldin, which the library itself never imports."""
