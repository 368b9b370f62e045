from PIL import Image
from tt_flux2_klein import KleinTT, open_device, close_device

dev = open_device()
try:
    model = KleinTT(dev)              # downloads black-forest-labs/FLUX.2-klein-4B@e7b7dc2 into your HF cache

    # text to image
    image, timing = model.generate("A red fox standing in fresh snow at dawn, wildlife photography",
                                   width=1024, height=1024, seed=42)

    # editing / reference-guided generation: pass 1-3 images
    edited, timing = model.generate("Replace the cup of coffee with a tall glass of orange juice.",
                                    width=512, height=512, seed=3,
                                    images=[Image.open("media/croissant512.png")])
    edited.save("output.png")
finally:
    close_device(dev)
