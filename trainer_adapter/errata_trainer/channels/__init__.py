"""The losses: functions of tensors, and what makes their tensors of rollouts. They know no trainer.

    splicing   a hint before a failing turn: the teacher's row, and which positions are compared
    forward    hidden states at positions: of the student's own pass, of teachers and references, of pairs
    heads      a model's output embedding, and what it does to its logits
    sdpo       channel 2, of logits            distil      of hidden states, a chunk at a time
    dpo        channel 3, of log-probabilities pairs       what can train, and a buffer of it on disk
    sampled    channel 2 without logits        prm         channel 3 as scores of turns
    compose    the sum of the channels         schedules   their weights over the steps
    guard      sites far from the others       arguments   what an option or a tensor has to be

Import a name from its module: `splicing`, `pairs`, `guard` and `schedules` need no torch.
"""
