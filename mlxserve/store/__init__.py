"""Where models come from: names, the hub, files on disk, and the loaded model."""
