cd /workspace/ledger
lost=$(git reflog --format='%H %gs' | awk '/commit: Say which Python/ {print $1; exit}')
git cherry-pick "$lost~1" "$lost"
git status --short
