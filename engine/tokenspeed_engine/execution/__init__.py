"""The execution plane: runs the control plane's plans on a device, every operation through the kernel registry."""
