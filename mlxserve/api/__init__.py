"""The HTTP side: one Starlette app, one package for each dialect, security and metrics around them."""
