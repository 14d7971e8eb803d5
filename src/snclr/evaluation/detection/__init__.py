"""Detection and instance segmentation with Mask R-CNN on a COCO-format folder: the transfer protocol of the paper."""
