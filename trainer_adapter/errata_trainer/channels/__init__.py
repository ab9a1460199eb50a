"""Loss functions, and the code that builds their input tensors from rollouts. Independent of any trainer.

    splicing   a hint before a failing turn: the teacher's row, and which positions are compared
    forward    hidden states at positions: of the student's own pass, of teachers and references, of pairs
    heads      a model's output embedding, and what it does to its logits
    sdpo       channel 2 from logits
    distil     channel 2 from hidden states, a chunk of tokens at a time
    sampled    channel 2 from log-probabilities of sampled tokens or of lists of ids
    dpo        channel 3 from log-probabilities
    pairs      which pairs can be trained on, and a buffer of pairs on disk
    prm        channel 3 as scores of turns
    compose    the sum of the channels         schedules   their weights over the steps
    guard      sites far from the others       arguments   what an option or a tensor has to be

Import a name from its module: `splicing`, `pairs`, `guard` and `schedules` need no torch.
"""
