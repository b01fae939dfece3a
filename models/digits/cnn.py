"""The classic digit classifier: two convolutions, two linear layers."""

# B batch, 1 channel, H height, W width

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from contract import Dropout, Spec
from models.layers import ForwardDtype, parse_dtype
from utils.errors import ConfigError

Rate = Annotated[float, Field(ge=0, lt=1)]


class CNN(nn.Module):
    """conv32 – conv64 – pool – fc128 – fc, with dropout before both linear layers."""

    def __init__(self, spec: Spec, dropout: tuple[Rate, Rate], forward_dtype: ForwardDtype) -> None:
        super().__init__()
        shape = getattr(spec, "image_shape", "none")
        if shape != (28, 28):
            raise ConfigError(
                f"arch=cnn needs images of 28×28, the data has {shape}; use"
                " data=digits or data=mnist"
            )
        self.dtype = parse_dtype(forward_dtype)
        self.dropout0, self.dropout1 = map(Dropout, dropout)
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, spec.num_classes)

    def forward(self, images_BHW: Tensor) -> Tensor:
        # the mean and the standard deviation of MNIST's pixels
        images_B1HW = ((images_BHW.unsqueeze(1).float() - 33.3) / 78.6).to(self.dtype)
        # 28×28 pixels become 64 channels of 12×12
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(images_B1HW)))), 2).flatten(1)
        x = F.relu(self.fc1(self.dropout0(x)))
        return self.fc2(self.dropout1(x))
