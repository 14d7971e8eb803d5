"""All of CIFAR-10 on two CPU cores in under half an hour, short enough to repeat with several seeds.

Command   snclr pretrain --recipe cifar-cpu --data cifar10 --out RUN
Cost      20 to 25 minutes on two cores that were shared with other work, from a folder of PNG files
Expected  with momentum 0.99, top-1 on the test images, seeds 0, 1, 2: kNN 54.8, 53.9, 54.1 %; linear 55.9, 55.7, 56.5 %
"""

from snclr.recipes import demo

# The demo's narrow encoder and settings. The dataset is about ten times larger: fewer epochs, a longer queue.
SETTINGS = {**demo.SETTINGS, "epochs": 16, "queue_length": 16_384}
