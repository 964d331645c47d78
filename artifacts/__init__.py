"""What somebody needs who uses a build: bytes, manifest, Hub, runtime."""
