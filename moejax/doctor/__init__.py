"""`moejax doctor`: is this machine, this mesh, this place fit to train on?

`command` and `machine` (which kernels run here), `smoke` (all parts in small), `mesh` with
`mesh_checks` (all processes of a program), `place` (the run's directory and the coordinator).
"""
