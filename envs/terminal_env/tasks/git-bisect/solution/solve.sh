cd /workspace/invoice
git config user.name Agent
git config user.email agent@example.org
git bisect start main v1.0 > /tmp/bisect.txt
git bisect run ./check.sh >> /tmp/bisect.txt 2>&1
culprit=$(git rev-parse refs/bisect/bad)
git bisect reset >> /tmp/bisect.txt 2>&1
echo "$culprit" | tee /workspace/culprit.txt
git revert --no-edit "$culprit"
./check.sh
