"""How long calls take, beside what the device could do: `tokenspeed-kernels bench` and `tune`.

`timing`: the median time of a call; graph replay, eager where that cannot be.
`rotation`: copies of a call's arguments, so that every call finds its data cold and its state fresh.
`ceilings`: what this device does at best, measured in the same process, and the floor of a call that follows.
`check`: whether what was timed was right.
`rows`: results, their order and their file.
`cells`: which cases are timed.
`measure`: one case of an op, all its kernels.
`peers`, `peer_times`: other projects' kernels on the same data.
`prepare`: compiles ahead, in parallel.
`tune`: picks compile-time choices by time.
`figures`, `report`: results as one HTML file.
`errors`: what is done about a kernel that fails.
`commands`: the command line.
"""
