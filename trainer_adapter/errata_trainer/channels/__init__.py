"""The losses: functions of tensors, and what makes their tensors of rollouts. They know no trainer.

`sdpo` and `distil` are channel 2, of logits and of hidden states; `splicing` makes its items. `dpo` is channel 3,
`pairs` its replay buffer. Import what you need from its module: `splicing` and `pairs` need no torch.
"""
