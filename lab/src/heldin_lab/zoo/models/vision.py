"""Models of images."""

from __future__ import annotations

from typing import Any

import torch

from heldin_lab.zoo.entry import Batch, Entry, Named, lib, normal

__all__ = ["ENTRIES"]


def timm(name: str, size: int = 32, **options: Any) -> Entry:
    def make() -> Any:
        return lib("timm").create_model(name, num_classes=5, **options)

    return Entry("timm", name, make, normal(3, size, size))


def segmentation(name: str, encoder: str = "mobilenet_v2", **options: Any) -> Entry:
    def make() -> Any:
        kind = getattr(lib("segmentation_models_pytorch"), name)
        return kind(encoder, encoder_weights=None, classes=2, **options)

    return Entry("segmentation-models-pytorch", name, make, normal(3, 32, 32))


def lucid(module: str, name: str, batch: Any = None, **options: Any) -> Entry:
    def make() -> Any:
        return getattr(lib(f"vit_pytorch.{module}"), name)(**options)

    return Entry("vit-pytorch", f"{module}.{name}", make, batch or normal(3, 16, 16))


def monai(name: str, *shape: int, **options: Any) -> Entry:
    def make() -> Any:
        return getattr(lib("monai.networks.nets"), name)(**options)

    return Entry("monai", name, make, normal(*shape))


def diffused(name: str, batch: Any, **options: Any) -> Entry:
    def make() -> Any:
        return getattr(lib("diffusers"), name)(**options)

    return Entry("diffusers", name, make, batch)


def noisy(m: int) -> Named:
    """Images and the time of each."""
    return {"sample": torch.randn(m, 3, 16, 16), "timestep": torch.randint(0, 100, (m,))}


def prompted(m: int) -> Batch:
    """Images, the time of each, and a text for each."""
    return {**noisy(m), "encoder_hidden_states": torch.randn(m, 5, 8)}


def latent(m: int) -> Batch:
    return {
        "hidden_states": torch.randn(m, 4, 8, 8),
        "timestep": torch.randint(0, 100, (m,)),
        "class_labels": torch.randint(0, 5, (m,)),
    }


VIT: dict[str, Any] = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2}
SMALL: dict[str, Any] = {
    "image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 16, "depth": 2, "heads": 2,
    "mlp_dim": 32,
}  # fmt: skip
BLOCKS: dict[str, Any] = {
    "block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1,
}  # fmt: skip

ENTRIES = [
    timm("resnet18"),
    timm("resnet26d"),
    timm("seresnet18"),
    timm("res2net50_14w_8s"),
    timm("densenet121"),
    timm("efficientnet_b0"),
    timm("mobilenetv3_small_050"),
    timm("ghostnet_050"),
    timm("regnetx_002"),
    timm("nf_resnet26"),
    timm("convnext_atto"),
    timm("vit_tiny_patch16_224", patch_size=8, **VIT),
    timm("deit_tiny_distilled_patch16_224", patch_size=8, **VIT),
    timm("beit_base_patch16_224", patch_size=8, **VIT),
    timm("eva02_tiny_patch14_224", patch_size=8, **VIT),
    timm("cait_xxs24_224", patch_size=8, **VIT),
    timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=12,
         depths=(1, 1), num_heads=(1, 2)),
    timm("maxvit_pico_rw_256", 64, img_size=64),
    timm("edgenext_xx_small"),
    timm("mobilevit_xxs", 64),
    timm("levit_128s", 32, img_size=32),
    timm("poolformer_s12"),
    timm("coat_tiny", 32, img_size=32),
    timm("volo_d1_224", 32, img_size=32),
    timm("xcit_nano_12_p8_224", 32, img_size=32),
    segmentation("Unet"),
    segmentation("UnetPlusPlus"),
    segmentation("FPN"),
    segmentation("PSPNet"),
    segmentation("Linknet"),
    segmentation("DeepLabV3Plus"),
    segmentation("MAnet"),
    segmentation("Segformer"),
    lucid("vit", "ViT", **SMALL),
    lucid("simple_vit", "SimpleViT", **SMALL),
    lucid("cait", "CaiT", **SMALL, cls_depth=1),
    lucid("deepvit", "DeepViT", **SMALL),
    lucid("cct", "CCT", img_size=(16, 16), embedding_dim=16, n_conv_layers=1, kernel_size=3,
          stride=1, padding=1, pooling_kernel_size=3, pooling_stride=2, pooling_padding=1,
          num_layers=1, num_heads=2, mlp_ratio=2.0, num_classes=5,
          positional_embedding="learnable"),
    lucid("t2t", "T2TViT", dim=16, image_size=16, depth=1, heads=2, mlp_dim=32, num_classes=5,
          t2t_layers=((3, 2), (3, 2))),
    lucid("pit", "PiT", image_size=16, patch_size=4, dim=16, num_classes=5, depth=(1, 1), heads=2,
          mlp_dim=32),
    lucid("vit_for_small_dataset", "ViT", **SMALL),
    lucid("mobile_vit", "MobileViT", normal(3, 64, 64), image_size=(64, 64), dims=[8, 8, 8],
          channels=[4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8], num_classes=5),
    lucid("na_vit", "NaViT", lambda m: ([torch.randn(3, 16, 16) for _ in range(m)],), **SMALL),
    monai("UNet", 1, 16, 16, spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8),
          strides=(2,)),
    monai("AttentionUnet", 1, 16, 16, spatial_dims=2, in_channels=1, out_channels=2,
          channels=(4, 8), strides=(2,)),
    monai("SegResNet", 1, 16, 16, spatial_dims=2, init_filters=8, blocks_down=(1, 1),
          blocks_up=(1,)),
    monai("VNet", 1, 32, 32, spatial_dims=2, dropout_dim=2),
    monai("DynUNet", 1, 16, 16, spatial_dims=2, in_channels=1, out_channels=2,
          kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[4, 8, 8]),
    monai("UNETR", 1, 32, 32, in_channels=1, out_channels=2, img_size=32, feature_size=4,
          hidden_size=16, mlp_dim=32, num_heads=2, spatial_dims=2),
    monai("ViTAutoEnc", 1, 16, 16, in_channels=1, img_size=16, patch_size=4, hidden_size=16,
          mlp_dim=32, num_layers=1, num_heads=2, spatial_dims=2),
    monai("HighResNet", 1, 8, 8, 8, spatial_dims=3, in_channels=1, out_channels=2),
    monai("AutoEncoder", 1, 16, 16, spatial_dims=2, in_channels=1, out_channels=1,
          channels=(4, 8), strides=(2, 2)),
    monai("VarAutoEncoder", 1, 16, 16, spatial_dims=2, in_shape=(1, 16, 16), out_channels=1,
          latent_size=3, channels=(4, 8), strides=(2, 2)),
    monai("Regressor", 1, 16, 16, in_shape=(1, 16, 16), out_shape=(2,), channels=(4, 8),
          strides=(2, 2)),
    diffused("UNet2DModel", noisy, sample_size=16, **BLOCKS,
             down_block_types=("DownBlock2D", "AttnDownBlock2D"),
             up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4),
    diffused("UNet2DConditionModel", prompted, sample_size=16, in_channels=3, out_channels=3,
             **BLOCKS, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
             up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=8,
             attention_head_dim=2),
    diffused("AutoencoderKL", normal(3, 16, 16), **BLOCKS,
             down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
             up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D")),
    diffused("DiTTransformer2DModel", latent, num_attention_heads=2, attention_head_dim=8,
             in_channels=4, num_layers=1, sample_size=8, norm_num_groups=1,
             num_embeds_ada_norm=5),
    Entry("kornia", "HardNet", lambda: lib("kornia.feature").HardNet(False), normal(1, 32, 32)),
    Entry("kornia", "SOSNet", lambda: lib("kornia.feature").SOSNet(False), normal(1, 32, 32)),
    Entry("efficientnet_pytorch", "EfficientNet-B0",
          lambda: lib("efficientnet_pytorch").EfficientNet.from_name(
              "efficientnet-b0", num_classes=5, drop_connect_rate=0.2),
          normal(3, 32, 32)),
]  # fmt: skip
