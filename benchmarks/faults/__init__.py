"""What hangs and what is slow, planted into real jobs: is it noticed, and is the right worker named with the right line?"""
