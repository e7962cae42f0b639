"""Pipeline stages: a train step whose layers are spread over several groups of devices.

Read in this order: `schedule` (what each tick does), `model` (the model as one stage sees it), with
`weights` (the gathered weights), `inputs` (the first stage's inputs, and their gradients),
`transfers` (activations from stage to stage), `stage` (a stage's layers, forward and backward, and
what it saves), `loss` (the loss step), `ticks` (the step), `forward` (evaluation and sampling).

Terms:

    stage            devices with an equal share of the layers; P of them, along one mesh axis
    virtual stage    one of the V chunks of layers on a stage (`model.stage_chunks`)
    slice            one of the N parts of a micro-batch's positions (`mesh.stage_slices`)
    task             a micro-batch, or a slice of it, in one virtual stage, forward or backward
    section          a task's virtual stage or slice, among the V N tasks of its micro-batch
    group            micro-batches that all run a section before any of them runs the next
    tick             the time of one task forward, one backward, or both; equal on all stages
    warm-up, steady, cool-down: phases of ticks with forward alone, both passes, backward alone
    bubble           tasks of a stage without a micro-batch: real tokens, results are discarded
    boundary         ticks at which micro-batches enter the first stage and leave the last
    loss step        loss of the last stage's output, each stage for a share of the positions
    slot             where a stage saves residuals, or its input, from forward to backward
    leading layers   embedding and layers before the stages, run on local micro-batches
    local            micro-batches whose data lies on this stage, M / P of all M
    inbound          hidden states of leading layers on the way to the first stage
"""
