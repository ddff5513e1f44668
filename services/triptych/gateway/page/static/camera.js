/** @file Takes pictures with the device's camera, where the browser has one and allows it. */

import { byId } from "./dom.js";

/** @type {Record<string, string>} */
const REFUSALS = {
  NotAllowedError: "The browser was not allowed to use the camera. Allow it for this page and try again.",
  NotFoundError: "This device has no camera.",
  NotReadableError: "Another program is using the camera.",
};

/**
 * Shows the camera button where there can be a camera, and wires its dialog.
 * @param {(file: File) => void} onPicture
 */
export function setUpCamera(onPicture) {
  if (!navigator.mediaDevices?.getUserMedia) return; // Not on https or localhost.
  const dialog = byId("camera", HTMLDialogElement);
  const note = byId("camera-note", HTMLElement);
  const take = byId("camera-take", HTMLButtonElement);
  const button = byId("add-camera", HTMLButtonElement);
  const video = dialog.querySelector("video");
  if (!video) throw new Error("the camera dialog has no video");
  /** @type {MediaStream | undefined} */
  let stream;

  const stop = () => {
    for (const track of stream?.getTracks() ?? []) track.stop();
    stream = undefined;
    video.srcObject = null;
  };

  button.hidden = false;
  button.addEventListener("click", async () => {
    dialog.showModal();
    take.disabled = true;
    note.textContent = "Waiting for the camera…";
    try {
      const opened = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
      stream = opened;
      if (!dialog.open) return stop(); // Closed while the browser asked.
      video.srcObject = opened;
      await video.play();
      note.textContent = "";
      take.disabled = false;
      take.focus();
    } catch (error) {
      const name = error instanceof DOMException ? error.name : "";
      if (dialog.open) note.textContent = REFUSALS[name] ?? "The camera cannot be used.";
    }
  });
  take.addEventListener("click", () => {
    const canvas = document.createElement("canvas");
    canvas.width = video.videoWidth;
    canvas.height = video.videoHeight;
    canvas.getContext("2d")?.drawImage(video, 0, 0);
    canvas.toBlob(
      (blob) => {
        dialog.close(); // First: it gives the focus back to where it was.
        if (blob) onPicture(new File([blob], "camera.jpg", { type: "image/jpeg" }));
      },
      "image/jpeg",
      0.92,
    );
  });
  byId("camera-cancel", HTMLButtonElement).addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", stop);
}
