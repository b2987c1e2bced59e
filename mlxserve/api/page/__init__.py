"""The web page at /: a chat, and a view of the engine's inside. Static files; `static/main.js` is their start."""
