"""How long calls take, beside what the device could do: `tokenspeed-kernels bench` and `tune`.

`timing`: the median time of a call; graph replay, eager where that cannot be.
`rotation`: copies of a call's arguments, so that every call finds its data cold and its state fresh.
`ceilings`: what this device does at best, measured in the same process, and the floor of a call that follows.
`check`: whether what was timed was right.
`rows`: results, their order and their file.
`measure`: one case of an op, all its kernels and peers.
`peers`: other projects' kernels on the same data.
`prepare`: compiles ahead, in parallel.
`tune`: picks compile-time choices by time.
`figures`, `html`: the report.
`commands`: the command line.
"""
