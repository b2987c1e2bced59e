"""The engine: one thread that owns the device, and the asyncio side that talks to it."""
