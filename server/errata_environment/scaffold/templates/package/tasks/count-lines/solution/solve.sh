grep -c . notes.txt > count.txt
